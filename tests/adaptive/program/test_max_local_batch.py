"""`max_local_batch="auto"`: microbatches as large as memory permits; memory that runs out in a step is an error."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.runtime.fused_program import FusedProgram
from adaptive.runtime.kernels import compiled as _compiled
from adaptive.runtime.kernels import memory_bound
from adaptive.runtime.local_world import LocalWorld
from tests.threaded_world import Job

FITS = 64
rng = np.random.default_rng(0)
DATA = {"x": rng.normal(size=(1024, 64)).astype(np.float32)}
DATA["y"] = DATA["x"].sum(1)


def loss_of(w, batch):
    return ((jnp.tanh(batch["x"] @ w).sum(1) - batch["y"]) ** 2).mean()


def driver(w, batch):
    loss, grads = jax.value_and_grad(loss_of)(w, batch)
    return w - 0.01 * comm.all_reduce(grads), {"loss": comm.all_reduce(loss)}


def built(driver=driver, workers=1, global_batch=256, **options):
    options = {"max_local_batch": "auto", "deterministic": True, **options}
    weights = jnp.asarray(rng.normal(size=(64, 4)).astype(np.float32)) * 0 + 0.1
    return ad.Program(driver, weights, DATA, global_batch=global_batch, world=LocalWorld(workers), **options)


def trained(program, steps=6):
    with program:
        reports = list(program.run(steps=steps))
        return reports, np.asarray(program.state)


def needs(size):
    """Return the bytes that a kernel needs, as XLA reports them."""
    memory = built(max_local_batch=None, microbatch=size, resizable=False)
    with memory as program:
        program.step()
        kernels = program._parts.engine.kernels.compiled.ready[0][size]
        return memory_bound.bytes_of([k.run for k in kernels.values()], kernels[0].batch_bytes)


@pytest.fixture
def room_for_64(monkeypatch):
    """Memory for a kernel of 64 examples, and not for one of 128."""
    assert needs(2 * FITS) > 1.2 * needs(FITS)
    left = 1.1 * needs(FITS) / 0.9
    monkeypatch.setattr("adaptive.program.parts.bytes_left", lambda devices, processes: left)


def limited(monkeypatch, compiled):
    """Compile kernels by `compiled(compile, size, limit)`. Returns a list of the limit, which a test may change."""
    limit, compile_segment = [FITS], _compiled.compile_segment

    def instead(function, shapes, device, *, name, **options):
        def compile():
            return compile_segment(function, shapes, device, name=name, **options)

        return compiled(compile, int(name.rsplit("_", 1)[1]), limit) if "microbatch" in name else compile()

    monkeypatch.setattr(_compiled, "compile_segment", instead)
    return limit


@pytest.fixture
def runs_out(monkeypatch):
    """Microbatches larger than these examples run out of memory when they run; nothing is known before."""

    def compiled(compile, size, limit):
        run = compile()

        def checked(*given):
            if size > limit[0]:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate\nmore")
            return run(*given)

        return checked

    return limited(monkeypatch, compiled)


@pytest.fixture
def fails_to_compile(monkeypatch):
    """Kernels for more examples than these cannot be compiled: as on GPUs, where XLA tries programs out."""

    def compiled(compile, size, limit):
        if size > limit[0]:
            raise jax.errors.JaxRuntimeError("NOT_FOUND: All configs failed:\nRESOURCE_EXHAUSTED: Out of memory")
        return compile()

    return limited(monkeypatch, compiled)


@pytest.mark.usefixtures("room_for_64")
@pytest.mark.parametrize(("workers", "resizable"), [(1, False), (2, True)])
def test_a_model_that_fits_64_trains_with_256_as_without_a_bound(workers, resizable):
    options = {"workers": workers, "resizable": resizable, "global_batch": 256 * workers}
    reports, state = trained(built(**options))
    assert reports[0].batch_sizes == (256,) * workers
    assert {m for report in reports for m in report.microbatches} == {(FITS,) * 4}
    assert any(f"at most {FITS} examples in one microbatch" in note for note in reports[0].notes)
    same = trained(built(**options, max_local_batch=None, microbatch=FITS))
    np.testing.assert_array_equal(state, same[1])
    unbounded = trained(built(**options, max_local_batch=None))
    assert unbounded[0][0].microbatches[0] == (256,)
    np.testing.assert_allclose(state, unbounded[1], rtol=1e-5)


@pytest.mark.usefixtures("room_for_64")
def test_larger_kernels_are_dropped_when_batches_grow():
    with built(global_batch=32, deterministic=False) as program:
        program.step()
        program.rescale(global_batch=512)
        program.warm_up()
        for _ in range(12):
            report = program.step()
        assert report.batch_sizes == (512,)
        assert max(report.microbatches[0]) <= FITS
        kernels = program._parts.engine.kernels
        assert max(kernels.compiled.ready[0]) <= FITS
        assert kernels.makes_all
        assert f"at most {FITS} examples" in program.explain()


@pytest.mark.parametrize(("workers", "steps"), [(1, 0), (2, 4)], ids=["the first step", "a steady step"])
def test_memory_that_runs_out_in_a_step_is_an_error_with_advice(runs_out, workers, steps):
    limit = runs_out
    bound = "auto" if steps else None
    with built(workers=workers, global_batch=256 * workers, resizable=False, max_local_batch=bound) as program:
        limit[0] = 1 << 20
        for _ in range(steps):
            program.step()
        before, limit[0] = np.asarray(program.state), FITS
        advice = r"microbatch=128\)" + r', or max_local_batch="auto"' * (bound is None)
        with pytest.raises(ad.OutOfMemoryError, match=rf"of 256 examples: RESOURCE_EXHAUSTED.*{advice}.*\. The st"):
            program.step()
        np.testing.assert_array_equal(program.state, before)
        limit[0] = 1 << 20  # something else has freed memory
        assert program.step().step == steps + 1


def test_a_kernel_that_cannot_be_compiled_for_lack_of_memory_is_a_smaller_one(fails_to_compile):
    reports, state = trained(built(resizable=False))
    assert {m for report in reports for m in report.microbatches} == {(FITS,) * 4}
    fails_to_compile[0] = 1 << 20
    np.testing.assert_allclose(state, trained(built(max_local_batch=None))[1], rtol=1e-5)


def test_without_auto_the_advice_is_given_for_a_kernel_that_cannot_be_compiled(fails_to_compile):
    with built(max_local_batch=None, resizable=False) as program:
        assert "in one microbatch" not in program.explain()
        with pytest.raises(jax.errors.JaxRuntimeError) as found:
            program.step()
    assert any('max_local_batch="auto"' in note for note in found.value.__notes__)


def test_an_example_for_which_nothing_can_be_compiled_ends_the_run(fails_to_compile):
    fails_to_compile[0] = 0
    with built(global_batch=4) as program, pytest.raises(ad.OutOfMemoryError, match="microbatch of 1, and there is no"):
        program.step()


class Fails:
    """A final segment that runs out of memory."""

    def __call__(self, *_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room for the update")


@pytest.mark.parametrize(("workers", "steps"), [(1, 4), (2, 1)])
def test_an_update_that_runs_out_of_memory_has_lost_the_state(workers, steps):
    with built(workers=workers, resizable=False) as program:
        for _ in range(steps):
            program.step()
        programs = program._parts.engine.context.programs
        for local_index in range(workers):
            programs["final", 0, local_index] = replace(programs["final", 0, local_index], run=Fails())
        program._parts.revision.increment()
        with pytest.raises(
            ad.OutOfMemoryError, match=r"in the update of the state: RESOURCE_EXHAUSTED: no room.*restore"
        ):
            program.step()


# --- several processes ------------------------------------------------------------------------------------------------


def test_processes_with_less_memory_run_smaller_microbatches_and_all_get_the_same():
    left = {0: 1e12, 1: 1.1 * needs(FITS) / 0.9}

    def script(world):
        options = {"max_local_batch": "auto", "deterministic": True, "resizable": False}
        with ad.Program(driver, jnp.full((64, 4), 0.1), DATA, global_batch=512, world=world, **options) as program:
            program._parts.engine.kernels.memory._find_left = lambda: left[world.rank]
            reports = [program.step() for _ in range(4)]
            return [r.microbatches[0] for r in reports], np.asarray(program.state)

    found = Job(2).run(script)
    assert {*found[0][0]} == {(256,)}
    assert {*found[1][0]} == {(FITS,) * 4}
    np.testing.assert_array_equal(found[0][1], found[1][1])


# --- one program over all devices -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("room_for_64")
def test_steps_as_one_program_over_all_devices_are_not_used_where_they_do_not_fit():
    with comm.DeviceWorld(jax.devices()[:2]) as world:
        options = {"max_local_batch": "auto", "deterministic": True, "resizable": False}
        with ad.Program(driver, jnp.full((64, 4), 0.1), DATA, global_batch=512, world=world, **options) as program:
            assert {m for _ in range(5) for m in program.step().microbatches} == {(FITS,) * 4}
            state = np.asarray(program.state)
    same = trained(built(workers=2, global_batch=512, resizable=False, max_local_batch=None), 5)
    np.testing.assert_allclose(state, same[1], rtol=1e-5)


def test_a_program_over_all_devices_that_runs_out_of_memory_has_lost_the_state(monkeypatch):
    ran = FusedProgram.__init__

    def fails(program, *given):
        ran(program, *given)
        program.run = Fails()

    monkeypatch.setattr(FusedProgram, "__init__", fails)
    with comm.DeviceWorld(jax.devices()[:2]) as world:
        options = {"max_local_batch": "auto", "deterministic": True, "resizable": False}
        program = ad.Program(driver, jnp.full((64, 4), 0.1), DATA, global_batch=64, world=world, **options)
        with program, pytest.raises(ad.OutOfMemoryError, match=r"in a step as one program over all devices.*restore"):
            list(program.run(steps=9))
