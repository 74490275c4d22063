"""The fused step and the host step: the same bits, the same reports, whichever of them takes which step."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import deque
from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from adaptive import operators
from adaptive.base.worker_mesh import WorkerMesh
from adaptive.runtime import engine as _engine
from adaptive.runtime.fused_program import FusedProgram
from adaptive.runtime.fused_step import FusedStep
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import Recorder
from tests.adaptive.runtime import test_host_step as host
from tests.adaptive.runtime.test_host_step import (
    DATA,
    LOCAL,
    compared,
    loss_of,
    plain,
    same,
    spoilt,
    two_levels,
    updated,
)

STEPS = 12


def begun():
    return {**host.begun(), "half": jnp.zeros(6, jnp.bfloat16), "own": jnp.zeros(())}


def of_many_kinds(state, batch):
    """Half precision, integers, extremes, gathered rows, and noise by step and worker."""
    loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
    half = comm.all_reduce(grads["w"].astype(jnp.bfloat16))
    key = jax.random.fold_in(jax.random.key(7), ad.step_number())
    metrics = {
        "loss": comm.all_reduce(loss),
        "largest": comm.all_reduce(jnp.abs(batch["x"]).max(), op="max"),
        "positive": comm.all_reduce((batch["y"] > 0).sum(), op="sum"),
        "rows": comm.all_gather(loss),
        "noise": jax.random.normal(key),
    }
    return updated(state, comm.all_reduce(grads), half=half), metrics


def monitored(state, batch):
    """Slots, a noise scale, seconds, and a hook that changes the split: equal, uneven, equal again."""
    loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
    mean = comm.all_reduce(grads)
    ctrl.hook(resplit, comm.all_gather(mon.compute_seconds()), every=1)
    metrics = {"smooth": mon.ema(comm.all_reduce(loss), 0.9), "scale": mon.noise_scale(grads, mean).scale}
    return updated(state, mean), metrics


def resplit(control, seconds):
    if control.step == 4:
        control.rescale(shares=[2, 1, 1, 4])
    if control.step == 7:
        control.rescale(shares=[1, 1, 1, 1])


def of_their_own(state, batch):
    """A leaf that is each worker's own."""
    grads = comm.all_reduce(jax.grad(loss_of)(state["params"], batch))
    return updated(state, grads, own=state["own"] + batch["y"].sum()), {}


DRIVERS = [of_many_kinds, monitored, of_their_own, spoilt]


@pytest.fixture
def taken(monkeypatch):
    """Whether each call of `FusedStep` has committed its step."""
    seen, take = [], FusedStep.__call__

    def counted(self, *args, **options):
        outcome = take(self, *args, **options)
        seen.append(outcome is not None)
        return outcome

    monkeypatch.setattr(FusedStep, "__call__", counted)
    return seen


@pytest.fixture
def on_host(monkeypatch):
    """Switches to the host step from then on."""
    return lambda: monkeypatch.setattr(FusedStep, "fits", lambda self, *_: False)


def built(driver, **options):
    options = {"deterministic": True, "nonfinite": "skip", "global_batch": 16, **options}
    if driver is of_their_own:
        options["per_worker_state"] = lambda state: state["own"]
    return ad.Program(driver, begun(), DATA, **options)


def trained(driver, **options):
    with comm.DeviceWorld() as world, built(driver, world=world, **options) as program:
        reports = [program.step() for _ in range(STEPS)]
        own = [np.asarray(leaf) for state in program._parts.engine.states for leaf in state]
        return reports, program.state, own


def same_courses(mine, other, driver):
    """Assert that the reports of two courses are the same, but for what is local, and so are the states."""
    for a, b in zip(mine[0], other[0], strict=True):
        for field in fields(a):
            if field.name not in LOCAL:
                same(getattr(a, field.name), getattr(b, field.name))
    same(mine[1:], other[1:])
    assert driver is not spoilt or sum(report.skipped for report in mine[0]) == 3


@pytest.mark.parametrize("driver", DRIVERS, ids=lambda driver: driver.__name__)
def test_both_give_the_same_states_and_reports(driver, taken, on_host):
    mine = trained(driver)
    assert sum(taken) >= 5
    on_host()
    taken.clear()
    other = trained(driver)
    assert not taken
    same_courses(mine, other, driver)
    assert driver is not monitored or {report.batch_sizes for report in mine[0]} == {(4, 4, 4, 4), (4, 2, 2, 8)}


def test_weights_that_are_equal_are_left_out_only_where_that_changes_no_bits(taken, on_host):
    options = {"global_batch": 20, "resizable": False}  # five examples on each worker
    mine = trained(plain, **options)
    assert sum(taken) >= 5
    on_host()
    same(mine[1:], trained(plain, **options)[1:])


def test_calls_between_steps_see_the_state_of_the_last_step(taken, on_host):
    def run(back_to):
        with comm.DeviceWorld() as world, built(two_levels, world=world) as program:
            seen = []
            for step in range(1, STEPS + 1):
                program.step()
                if step == 3:
                    seen.append(program.evaluate(lambda s, b: loss_of(s["params"], b), DATA, batch=16))
                if step == back_to:
                    checkpoint = program.checkpoint()
                seen.append(program.state["params"])
            program.restore(checkpoint)
            seen += [program.step().metrics for _ in range(5)]
            return seen, program.state

    mine = run(6)
    assert sum(taken) > 9
    on_host()
    same(run(6), mine)


def test_each_worker_is_timed_now_and_then():
    with comm.DeviceWorld() as world, built(monitored, world=world) as program:
        program.warm_up()  # beside a compiler nothing is measured
        seconds = [program.step().compute_seconds for _ in range(4)]
    assert len(set(seconds[1])) == 4  # by the host step: of each by itself
    assert seconds[2] == seconds[1]  # reported again


def test_without_determinism_steps_move_from_the_general_path_to_one_program(taken, on_host):
    def course():
        with comm.DeviceWorld() as world, built(plain, world=world, deterministic=False, resizable=False) as program:
            first = [program.step()]
            program.warm_up()
            return first + [program.step() for _ in range(7)], program.state

    reports, state = course()
    assert len(taken) >= 4
    on_host()
    others, other = course()
    same(state, other)
    same([r.metrics for r in reports], [r.metrics for r in others])


def test_a_driver_with_callbacks_stays_on_the_general_path(taken):
    def driver(state, batch):
        jax.debug.callback(lambda x: None, state)
        return state + comm.all_reduce(batch["y"].mean()), {}

    with comm.DeviceWorld() as world, ad.Program(driver, jnp.zeros(()), DATA, global_batch=16, world=world) as program:
        program.step()
        program.warm_up()
        program.step()
    assert not taken


def test_a_program_that_cannot_be_compiled_is_warned_of_once(taken, monkeypatch, caplog):
    def fails(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room for the program\nand more")

    monkeypatch.setattr("adaptive.runtime.fused_step.FusedProgram", fails)
    with comm.DeviceWorld() as world, built(plain, world=world) as program:
        for _ in range(5):
            program.step()
    assert not taken
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "it could not be compiled: JaxRuntimeError: RESOURCE_EXHAUSTED: no room for the program. Steps" in warning
    assert "smaller local batch" in warning


def test_a_program_that_needs_more_memory_than_is_left_does_not_run(taken, monkeypatch, caplog):
    monkeypatch.setattr("adaptive.runtime.fused_step.bytes_of", lambda programs, nbytes: 5 << 20)
    with comm.DeviceWorld() as world, built(plain, world=world, max_local_batch="auto") as program:
        bound = program._parts.engine.kernels.memory
        monkeypatch.setattr(bound, "fits", lambda nbytes: nbytes < 5 << 20)
        for _ in range(5):
            program.step()
    assert not taken
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "it needs 5 MiB, more than is left. Steps continue" in warning


def test_a_program_that_was_closed_is_compiled_no_more_and_not_warned_of(caplog):
    with comm.DeviceWorld() as world:
        program = ad.Program(plain, begun(), DATA, global_batch=16, world=world)
        fused, context = program._parts.engine.fused, weakref.ref(program._parts.engine.context)
        program.close()
        del program
        gc.collect()
        assert context() is None
        fused.compile((4,))
    assert not caplog.records


def test_an_error_of_the_next_examples_leaves_the_state_of_the_last_step(monkeypatch):
    with comm.DeviceWorld(jax.devices()[:2]) as world:
        program = ad.Program(plain, begun(), DATA, global_batch=16, world=world, deterministic=True)
        for _ in range(5):
            program.step()
        before, steps = jax.tree.map(np.asarray, program.state), program.steps
        with monkeypatch.context() as broken:
            broken.setattr(program._parts.stream, "prefetch", lambda sizes: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                program.step()
        assert program.steps == steps
        jax.tree.map(np.testing.assert_array_equal, program.state, before)
        program.step()
    with pytest.raises(Exception, match=r"closed|left"):
        program.step()


# --- a host that does not wait ----------------------------------------------------------------------------------------


def spoilt_from(number):
    """A driver whose gradients are NaN in one step."""

    def driver(state, batch):
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        grads = jax.tree.map(lambda g: jnp.where(ad.step_number() == number, jnp.nan, g), grads)
        return updated(state, comm.all_reduce(grads)), {"loss": comm.all_reduce(loss)}

    return driver


@pytest.fixture
def late(monkeypatch):
    """Verdicts that are not there before they must be; returns the numbers of the steps that were dispatched."""
    dispatched, run, read = [], FusedStep._run, FusedStep._read

    class Late:
        def __init__(self, verdict):
            self.verdict = verdict

        def is_ready(self):
            return False

        def __array__(self, dtype=None, copy=None):
            return np.asarray(self.verdict)

    def noted(self, program, held, given, *args):
        dispatched.append(self._next)
        return run(self, program, held, given, *args)

    def read_late(self, most):
        self._verdicts = deque(v if isinstance(v, Late) else Late(v) for v in self._verdicts)
        read(self, most)

    monkeypatch.setattr(FusedStep, "_run", noted)
    monkeypatch.setattr(FusedStep, "_read", read_late)
    return dispatched


def test_an_error_leaves_the_state_of_the_step_before_though_the_next_was_dispatched(late):
    with comm.DeviceWorld() as world, built(spoilt_from(8), world=world, nonfinite="raise", resizable=False) as program:
        with pytest.raises(ad.NonFiniteError, match=r"step 9: the contributions of workers 0, 1, 2, 3") as caught:
            list(program.run(steps=STEPS))
        assert max(late) >= 9  # step 10, by the number of steps before it
        assert "The state is that of step 8" in str(caught.value)
        assert program.steps == 8
        state = program.state
    with comm.DeviceWorld() as world, built(plain, world=world) as program:
        list(program.run(steps=8))
        same(state, program.state)


def test_a_step_that_is_skipped_late_gives_what_one_that_is_waited_for_gives(late):
    """The steps after it are taken back, and reported once more."""

    def course(steps_of):
        with comm.DeviceWorld() as world, built(spoilt_from(8), world=world, resizable=False) as program:
            reports = [(r.step, r.skipped, r.examples, r.metrics) for r in steps_of(program)]
            return reports, program.state, program.steps

    pipelined, state, steps = course(lambda program: program.run(steps=STEPS))
    waited, expected, _ = course(lambda program: [program.step() for _ in range(STEPS)])
    assert steps == STEPS
    assert [step for step, *_ in pipelined].count(9) == 2
    same({step: rest for step, *rest in pipelined}, {step: rest for step, *rest in waited})
    same(state, expected)


def test_leaves_that_share_a_new_value_keep_their_old_ones_in_a_step_that_is_skipped(taken):
    def driver(state, batch):
        mean = comm.all_reduce(jnp.where(ad.step_number() == 0, jnp.nan, jax.tree.leaves(batch)[0].mean()))
        new = state["a"] + mean
        return {"a": new, "b": new}, {}

    options = {"global_batch": 16, "deterministic": True, "nonfinite": "skip"}
    with comm.DeviceWorld() as world, ad.Program(driver, {"a": 1.0, "b": 2.0}, DATA, world=world, **options) as program:
        assert program.step().skipped
        assert (float(program.state["a"]), float(program.state["b"])) == (1, 2)
        assert taken == [False]


def test_a_checkpoint_between_steps_is_of_steps_that_are_known_to_be_finite(late):
    with comm.DeviceWorld() as world, built(spoilt_from(8), world=world, resizable=False) as program:
        for report in program.run(steps=STEPS):
            if report.step == 10:
                break
        assert program.checkpoint()["step"] == program.steps == 8
        assert program.step().skipped


def test_a_stop_on_values_of_a_step_that_is_taken_back_is_decided_again(late):
    with comm.DeviceWorld() as world, built(spoilt_from(8), world=world, resizable=False) as program:
        reports = []
        for report in program.run(steps=STEPS):
            reports.append((report.step, report.skipped))
            if report.step == 9:
                program.stop()
        assert reports[-2:] == [(9, False), (9, True)]
        assert program.steps == 9


def test_hooks_see_no_step_that_is_taken_back(late):
    watch = Recorder(every_step=True)

    def driver(state, batch):
        state, metrics = spoilt_from(8)(state, batch)
        operators.hook("watch", watch, (metrics["loss"],), every=6)
        return state, metrics

    with comm.DeviceWorld() as world, built(driver, world=world, resizable=False) as program:
        list(program.run(steps=STEPS))
    assert [observation.step for observation in watch.seen] == [n for n in range(1, STEPS + 1) if n != 9]


def test_a_steady_step_is_one_dispatch_and_the_host_waits_for_nothing(late, monkeypatch):
    """Counted: compiled programs that are run, and arrays that are read or waited for before they are there."""
    runs, waits, run = [], [], FusedProgram.__init__

    class Sink:
        def write(self, event):
            pass

        def close(self):
            pass

    def count(frame, event, arg):
        name, of = frame.f_code.co_name, frame.f_locals.get("self")
        if event == "c_call":
            name, of = arg.__name__, getattr(arg, "__self__", None)
        if event in ("call", "c_call") and isinstance(of, jax.Array):
            if name in ("block_until_ready", "__array__", "_value", "tolist", "item") and not of.is_ready():
                waits.append(name)
        elif event == "call" and isinstance(of, jax.stages.Compiled) and name == "__call__":
            runs.append(of)

    monkeypatch.setattr("adaptive.runtime.fused_step.UNDER_WAY", 1 << 30)
    with comm.DeviceWorld() as world, built(monitored_by_step, world=world, resizable=False) as program:
        run = program.run(steps=40, log=[Sink()])
        for _ in range(20):
            next(run)
        sys.setprofile(count)
        try:
            for _ in range(10):
                next(run)
        finally:
            sys.setprofile(None)
        run.close()
    assert len(runs) == 10
    assert waits == []


def monitored_by_step(state, batch):
    loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
    mean = comm.all_reduce(grads)
    metrics = {"loss": comm.all_reduce(loss), "scale": mon.noise_scale(grads, mean).scale}
    ctrl.hook(lambda control, loss: None, metrics["loss"], every=100)
    return updated(state, mean), metrics


# --- a lone worker on an accelerator ----------------------------------------------------------------------------------


def test_a_lone_worker_of_an_accelerator_has_fused_steps_too(taken, monkeypatch):
    """On a CPU in its place. The number of microbatches stays, so they run in the program."""

    def course():
        with built(compared, world=LocalWorld(1)) as program:
            return [program.step() for _ in range(STEPS)], program.state

    expected = course()
    assert not taken
    monkeypatch.setattr(_engine, "mesh_for", lambda world: WorkerMesh(world.devices))
    found = course()
    assert sum(taken) >= 5
    same_courses((found[0], found[1]), (expected[0], expected[1]), compared)
