"""Programs are compiled once per device of a process, and are read from JAX's persistent cache."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import adaptive as ad
import collectives as comm
from adaptive.runtime.kernels.compile import compile_segment, compiler_options
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import make_data


def shape(device=None):
    on = jax.sharding.SingleDeviceSharding(device or jax.local_devices()[0])
    return jax.ShapeDtypeStruct((2,), jnp.float32, sharding=on)


@pytest.fixture
def folder(tmp_path):
    """A compilation cache with nothing in it."""
    before = jax.config.jax_compilation_cache_dir
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", before)


def update(rate, device=None):
    """A program that depends on a number."""
    return compile_segment(lambda x: x - rate * x, (shape(device),), device or jax.local_devices()[0], name="update")


def result(compiled):
    return float(compiled(np.ones(2, np.float32))[0])


def test_a_program_runs_on_its_device():
    for device in jax.local_devices():
        found = update(0.125, device)(jax.device_put(np.arange(2, dtype=np.float32), device))
        assert found.devices() == {device}
        assert found.tolist() == [0, 0.875]


def test_unused_arguments_are_kept():
    one = compile_segment(lambda x, y: x, (shape(), shape()), jax.local_devices()[0], name="choose")
    assert one(np.zeros(2, np.float32), np.ones(2, np.float32)).tolist() == [0, 0]


def test_a_program_is_read_from_the_cache(folder):
    update(0.25)
    (entry,) = folder.glob("jit_update-*-cache")
    before = entry.read_bytes()
    assert result(update(0.25)) == 0.75
    assert [entry.read_bytes()] == [before]
    assert list(folder.glob("jit_update-*-cache")) == [entry]


def test_memory_is_given_up_where_it_may_be():
    for device in jax.local_devices():
        run = compile_segment(lambda x: x + 1, (shape(device),), device, donate=1)
        old = jax.device_put(np.ones(2, np.float32), device, may_alias=False)
        assert run(old)[0] == 2
        assert old.is_deleted()


def test_programs_are_named_for_their_driver_and_size_and_shared_by_workers_of_a_device():
    def train(state, batch):
        return state + comm.all_reduce(batch["y"].mean()), {}

    world = LocalWorld(2)
    with ad.Program(train, 0.0, make_data(24), global_batch=4, world=world, resizable=False) as program:
        program.step()
        kernels, programs = program._parts.engine.kernels, program._parts.engine.context.programs
        assert kernels.kernel(0, 2, 0).run is kernels.kernel(1, 2, 0).run
        assert programs["final", 0, 0] is programs["final", 0, 1]
        for compiled, name in ((kernels.kernel(0, 2, 0).run, "microbatch_0_2"), (programs["final", 0, 0].run, "final")):
            (module,) = compiled.runtime_executable().hlo_modules()
            assert module.name == f"jit_train_{name}"


def test_compilers_of_gpus_do_not_wait_for_each_other(monkeypatch):
    """The processes of `jax.distributed` compile in different orders."""
    gpu, cpu = SimpleNamespace(platform="gpu"), jax.local_devices()[0]
    assert compiler_options(gpu) is None
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert compiler_options(cpu) is None
    options = compiler_options(gpu)
    assert options == {"xla_gpu_shard_autotuning": False}
    jax.jit(lambda x: x + 1).lower(shape()).compile(compiler_options=options)  # XLA knows it
