"""A program is what it was compiled from, wherever it comes from."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import adaptive as ad
import collectives as comm
from adaptive.runtime.cache import CompilationCacheWarning
from adaptive.runtime.compile import compile_segment
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import make_data

SHAPE = jax.ShapeDtypeStruct((2,), jnp.float32)


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
    return compile_segment(lambda x: x - rate * x, (SHAPE,), device or jax.local_devices()[0], name="update")


def name_of(compiled):
    (module,) = compiled.runtime_executable().hlo_modules()
    return module.name


def result(compiled):
    return float(compiled(np.ones(2, np.float32))[0])


def test_compiled_programs_are_named_for_their_segments():
    assert re.fullmatch(r"update_[0-9a-f]{16}", name_of(update(0.25)))
    assert name_of(update(0.25)) == name_of(update(0.25)) != name_of(update(0.5))
    assert name_of(update(0.25)) == name_of(update(0.25, jax.local_devices()[1]))


def test_line_numbers_do_not_change_the_cache_key():
    def above(x):
        return x - 0.25 * x

    assert name_of(compile_segment(above, (SHAPE,), jax.local_devices()[0], name="update")) == name_of(update(0.25))


@pytest.fixture
def compiles(monkeypatch, folder):
    """Counts what XLA compiles, or looks for in a cache that is empty at first."""
    count = []
    compile_ = jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *a, **k: count.append(a) or compile_(*a, **k))
    return count


def test_devices_of_a_kind_share_compiled_programs(compiles):
    devices = jax.local_devices()
    programs = [update(0.125, device) for device in (*devices, devices[0])]
    assert len(compiles) == 1
    assert programs[-1] is programs[0]
    for program, device in zip(programs, devices, strict=False):
        result = program(jax.device_put(np.arange(2, dtype=np.float32), device))
        assert result.devices() == {device}
        assert result.tolist() == [0, 0.875]


def test_a_program_from_the_cache_is_compiled_again_for_another_device(compiles):
    one, other = jax.local_devices()[:2]
    result(update(0.03125, one))
    jax.clear_caches()
    kept = update(0.03125, one)  # XLA does not keep the code of what it reads from there
    assert update(0.03125, other)(jax.device_put(np.ones(2, np.float32), other)).tolist() == [0.96875] * 2
    assert len(compiles) == 3
    assert result(kept) == 0.96875


def test_memory_that_is_given_up_is_so_on_every_device(compiles):
    kept = []
    for device in jax.local_devices():
        program = compile_segment(lambda x: 2 * x, (SHAPE,), device, name="double", donate=True)
        given = jax.device_put(np.ones(2, np.float32), device)
        assert program(given).tolist() == [2, 2]
        assert given.is_deleted()
        assert len(compiles) == 1
        kept.append(program)


def test_unused_programs_are_forgotten(compiles):
    update(0.0625)
    update(0.0625)
    assert len(compiles) == 2


def test_equal_equations_with_another_output_tree_are_another_program(compiles):
    one, other = (
        compile_segment(f, (SHAPE,), jax.local_devices()[0], name="tree")
        for f in (lambda x: {"a": x + 3}, lambda x: {"b": x + 3})
    )
    assert (list(one(np.ones(2, np.float32))), list(other(np.ones(2, np.float32)))) == (["a"], ["b"])


def test_which_argument_is_used_makes_another_program(compiles):
    one, other = (
        compile_segment(f, (SHAPE, SHAPE), jax.local_devices()[0], name="choose")
        for f in (lambda x, y: x, lambda x, y: y)
    )
    given = np.zeros(2, np.float32), np.ones(2, np.float32)
    assert (one(*given).tolist(), other(*given).tolist()) == ([0, 0], [1, 1])


def test_programs_with_callbacks_are_distinguished(compiles):
    def calls(number):
        def function(x):
            return x + jax.pure_callback(lambda: np.float32(number), jax.ShapeDtypeStruct((), np.float32))

        return compile_segment(function, (SHAPE,), jax.local_devices()[0], name="calls")

    one, other = calls(1), calls(2)
    assert (result(one), result(other)) == (2, 3)
    assert len(compiles) == 2


def test_a_program_is_read_from_the_cache(folder):
    update(0.25)
    (entry,) = folder.glob("update_*-cache")
    before = entry.read_bytes()
    assert result(update(0.25)) == 0.75
    assert [entry.read_bytes()] == [before]
    assert list(folder.glob("update_*-cache")) == [entry]


def test_a_wrong_cache_entry_is_not_run(folder):
    update(0.25), update(0.5)
    one, other = folder.glob("update_*-cache")
    contents = one.read_bytes(), other.read_bytes()
    other.write_bytes(contents[0])
    one.write_bytes(contents[1])
    for rate in (0.25, 0.5):
        with pytest.warns(CompilationCacheWarning, match=f"{folder} holds another program under the name of update_"):
            assert result(update(rate)) == 1 - rate


def test_memory_is_given_up_where_it_may_be():
    run = compile_segment(lambda x: x + 1, (SHAPE,), jax.local_devices()[0], donate=True)
    old = jax.device_put(np.ones(2, np.float32), jax.local_devices()[0], may_alias=False)
    assert run(old)[0] == 2
    assert old.is_deleted()


def test_kernels_are_called_by_their_driver_and_size_and_shared_by_its_programs():
    def train(state, batch):
        return state + comm.all_reduce(batch["y"].mean()), {}

    kernels = []
    for _ in range(2):
        program = ad.Program(train, 0.0, make_data(24), global_batch=4, world=LocalWorld(2), resizable=False)
        with program:
            program.step()
            kernels.append(
                (
                    program._parts.engine.kernels.kernel(0, 2, 0).run,
                    program._parts.engine.context.programs["final", 0, 0],
                )
            )
    assert kernels[0] == kernels[1]
    names = [name_of(compiled) for compiled in kernels[0]]
    assert re.fullmatch(r"train_microbatch_0_2_[0-9a-f]{16} train_final_[0-9a-f]{16}", " ".join(names))
