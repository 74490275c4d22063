"""A program between its steps: what it owns, what it reports, when decisions hold, and how it ends."""

from __future__ import annotations

import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive import operators
from adaptive.base.decision import Decision
from adaptive.base.process import failure as _failure
from adaptive.base.worker_slots import WorkerSlots
from adaptive.control.status import status_length
from adaptive.operators.sources import Source, read
from adaptive.program import reports
from adaptive.runtime.kernels import kernels as _kernels
from adaptive.runtime.local_world import LocalWorld
from adaptive.runtime.message import accumulate
from tests.adaptive.drivers import (
    FEATURES,
    HeldCompiler,
    Recorder,
    make_data,
    mean_loss,
    sizes_of,
    two_statuses,
)

W = np.array([0.3, -0.2, 0.1], np.float32)


def sgd(state, batch):
    loss, grads = jax.value_and_grad(mean_loss)(state, batch)
    return state - 0.1 * comm.all_reduce(grads), {"loss": comm.all_reduce(loss)}


def mean_of_y(state, batch):
    """The smallest driver there is."""
    mean = comm.all_reduce(batch["y"].mean())
    return state + mean, {"mean": mean}


def watched(handler, every=1):
    def driver(state, batch):
        mean = comm.all_reduce(batch["y"].mean())
        operators.hook("watch", handler, (mean,), every=every)
        return state + mean, {"mean": mean}

    return driver


def build(driver=mean_of_y, state=0.0, *, workers=2, global_batch=6, data=None, **options):
    world = options.pop("world", None) or LocalWorld(workers)
    data = make_data(24) if data is None else data
    return ad.Program(driver, state, data, global_batch=global_batch, world=world, **options)


class Broken:
    """A source of which some examples cannot be read."""

    def __init__(self, y=None):
        self.data, self.bad = make_data(24) if y is None else {"y": y}, set()

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError(f"example {index} is gone")
        return {k: v[index] for k, v in self.data.items()}


# --- what it owns -----------------------------------------------------------------------------------------------------


def test_state_and_metrics_that_were_read_survive_further_steps():
    def driver(state, batch):
        new, metrics = sgd(state, batch)
        return new, {**metrics, "new": new, "old": state}

    with build(driver, jnp.asarray(W)) as program:
        reports, states = [], []
        for _ in range(4):
            states.append(program.state)
            reports.append(program.step())
        final = np.asarray(program.state)
    for number, report in enumerate(reports):
        assert np.array_equal(report.metrics["old"], states[number])
        after = states[number + 1] if number < 3 else final
        assert np.array_equal(report.metrics["new"], after)
    assert not np.array_equal(states[0], final)


def test_thread_local_settings_of_jax_hold_in_the_background_compiler():
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        seen = []

        def driver(state, batch):
            seen.append((jax.config.jax_default_matmul_precision, batch["y"].dtype))
            return mean_of_y(state, batch)

        with build(driver, np.zeros(()), data=Broken(np.arange(24.0)), global_batch=24) as program:
            program.warm_up()
            program.rescale(shares=(7, 17))
            program.step()
            assert program.state.dtype == np.float64
            assert abs(float(program.state) - 11.5) < 1e-14
            assert program.check()
    assert set(seen) == {("highest", np.dtype(np.float64))}
    assert not jax.config.jax_enable_x64


# --- seconds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "known"), [(2, [False, True, False, False, True]), (4, [False, True, True, True, True])]
)
def test_on_few_cores_a_step_beside_the_compiler_is_not_a_measurement(monkeypatch, cores, known):
    """Or balancing would follow what compiling costs, and take it back."""
    monkeypatch.setattr(_kernels, "n_cores", lambda: cores)
    seconds = Source("seconds", lambda r: r.compute_seconds)

    def driver(state, batch):
        mean = comm.all_reduce(batch["y"].mean())
        return state + mean, {"seconds": comm.all_gather(read(seconds))}

    with build(driver, data=make_data(96)) as program:
        program.warm_up()
        held, reports = HeldCompiler(program._parts.engine.kernels), [program.step()]
        program.rescale(global_batch=64)  # asks for larger kernels
        reports.append(program.step())  # beside the compiler
        held.compile()
        reports += [program.step() for _ in range(3)]  # the first of them began beside it
    assert [bool(np.isfinite(r.metrics["seconds"]).all()) for r in reports] == known
    assert all(s > 0 for r in reports for s in r.compute_seconds)


# --- reports ----------------------------------------------------------------------------------------------------------


def test_a_report_describes_its_step():
    with build(sgd, W, shares=(4, 2)) as program:
        reports = [program.step() for _ in range(5)]
        layouts = program._parts.engine.layouts
        explained = program.explain()
    assert [r.step for r in reports] == [1, 2, 3, 4, 5]
    assert [r.examples for r in reports] == [6, 12, 18, 24, 30]
    assert [r.epoch for r in reports] == [0, 0, 0, 1, 1]
    for r in reports:
        assert (r.batch_sizes, r.global_batch) == ((4, 2), 6)
        assert [sum(microbatches) for microbatches in r.microbatches] == [4, 2]
        assert r.messages == 1
        assert r.message_bytes == layouts[0].nbytes == 4 * (FEATURES + 1 + 1 + status_length(2))
        assert r.seconds > 0
        assert len(r.compute_seconds) == 2
        assert all(0 < s <= r.seconds for s in r.compute_seconds)
        assert (r.decision, r.skipped, r.notes) == (None, False, ())
        assert np.isfinite(r.metrics["loss"])
    assert reports[0].waited_seconds > 0
    assert reports[-1].waited_seconds == reports[0].waited_seconds
    assert f"{layouts[0].nbytes} B from each worker" in explained


# --- decisions --------------------------------------------------------------------------------------------------------


def test_a_decision_holds_from_the_first_step_that_every_worker_has_kernels_for():
    asked = {2: Decision(global_batch=10, shares=(7, 3))}
    recorder = Recorder(lambda o: asked.get(o.step))
    with build(watched(recorder), 0.0) as program:
        compiler = HeldCompiler(program._parts.engine.kernels)
        reports = [program.step() for _ in range(5)]
        assert sizes_of(reports) == [(3, 3)] * 5
        assert program.batch_sizes == (3, 3)
        assert [o.global_batch for o in recorder.seen] == [6, 6, 10, 10, 10]  # what was asked for
        compiler.compile()
        reports = [program.step() for _ in range(3)]
    assert sizes_of(reports) == [(3, 3), (7, 3), (7, 3)]  # a message had to say that all are ready
    assert reports[-1].waited_seconds == reports[0].waited_seconds


def test_a_deterministic_program_uses_a_new_size_at_once():
    with build(deterministic=True) as program:
        held, sizes = HeldCompiler(program._parts.engine.kernels), []
        for batch in (6, 13, 24, 7):
            program.rescale(global_batch=batch)
            report = program.step()
            sizes.append(report.batch_sizes)
            assert all(size.bit_count() == 1 for microbatches in report.microbatches for size in microbatches)
        assert not held.idle
    assert sizes == [(3, 3), (7, 6), (12, 12), (4, 3)]


def test_a_driver_with_no_message_waits_for_a_new_size_instead():
    def alone(state, batch):
        return state + ad.global_batch(), {}

    with build(alone, 0, workers=1) as program:
        program.step()
        program.rescale(global_batch=7)
        assert program.step().global_batch == 7
        assert int(program.state) == 13


# --- steps that fail --------------------------------------------------------------------------------------------------


def test_a_data_error_changes_nothing_and_the_program_continues():
    data = Broken()
    with build(sgd, W, data=data) as program, build(sgd, W) as other:
        program.step()
        program._parts.stream._ahead[2]()  # what is fetched ahead is there before the data break
        data.bad = set(range(24))
        with pytest.raises(OSError, match="is gone") as error:
            [program.step() for _ in range(2)]  # the first of them was fetched ahead
        assert any("in step 3, on workers 0–1" in note for note in error.value.__notes__)
        assert program.steps == 2
        data.bad = set()
        assert program.step().examples == 18
        for _ in other.run(steps=3):
            pass
        assert np.array_equal(program.state, other.state)


def test_a_step_that_is_skipped_uses_up_its_examples_and_leaves_the_state():
    recorder = Recorder()

    def driver(state, batch):
        new, metrics = sgd(state["w"], batch)
        operators.hook("watch", recorder, (metrics["loss"],))
        return {"w": new, "step": state["step"] + 1}, {**metrics, "step": state["step"]}

    data = make_data(24)
    data["y"][5] = np.inf
    with build(driver, {"w": W, "step": 0}, data=data, global_batch=8, nonfinite="skip") as program:
        reports, states = [], [program.state]
        for report in program.run(epochs=1):
            reports.append(report)
            states.append(program.state)
    (bad,) = [r for r in reports if r.skipped]
    (note,) = bad.notes
    assert re.match(r"skipped: the contributions of worker [01] to all_reduce \(test_program.py:\d+\) hold", note)
    assert np.isnan(bad.metrics["loss"])
    assert np.isnan(bad.metrics["step"])
    assert jax.tree.all(jax.tree.map(np.array_equal, states[bad.step - 1], states[bad.step]))
    assert [o.step for o in recorder.seen] == [r.step for r in reports if not r.skipped]


@pytest.mark.parametrize("hooked", [False, True], ids=["plain steps", "steps with a hook"])
def test_a_step_that_is_finite_lets_as_many_be_skipped_again(hooked, monkeypatch):
    """Skipped, fine, skipped, fine, skipped, skipped: one in a row may be, and not two."""
    monkeypatch.setattr(reports, "MOST_SKIPPED", 1)
    data = {"x": np.ones((24, 3), np.float32), "y": np.arange(24, dtype=np.float32)}

    def driver(state, batch):
        bad = (ad.step_number() % 2 == 0) | (ad.step_number() > 4)
        mean = comm.all_reduce(jnp.where(bad, jnp.inf, batch["y"].mean()))
        if hooked:
            operators.hook("watch", Recorder(every_step=True), (mean,))
        return state + mean, {}

    with build(driver, 0.0, data=data, global_batch=8, nonfinite="skip") as program:
        assert [program.step().skipped for _ in range(5)] == [True, False, True, False, True]
        with pytest.raises(ad.NonFiniteError):
            program.step()


def test_errors_of_the_background_compiler_are_raised_in_the_next_step():
    def picky(state, batch):
        if batch["y"].shape[0] == 1:
            raise ValueError("not of one example")
        return mean_of_y(state, batch)

    with build(picky) as program:
        compiler = HeldCompiler(program._parts.engine.kernels)
        program.step()
        with pytest.raises(ValueError, match="not of one example") as error:
            compiler.compile(1)
        compiler.error = error.value
        before = program.state
        with pytest.raises(ValueError, match="not of one example"):
            program.step()
        assert program.state == before
        assert program.steps == 1


def test_kernels_are_not_run_on_made_up_data():
    """On zeros this loop would never end, and the check would fail."""

    def positive(x):
        assert (x > 0).all()

    def driver(state, batch):
        jax.debug.callback(positive, batch["x"])
        large = jax.lax.while_loop(lambda x: x < 100, lambda x: 2 * x, batch["x"].mean())
        return state + comm.all_reduce(large), {}

    with build(driver, data={"x": np.ones((24, 1), np.float32)}) as program:
        program.warm_up()
        program.step()
        jax.effects_barrier()
        assert program.state == 128


def test_a_program_that_is_closed_may_continue():
    with build() as program:
        program.step()
    assert program.step().step == 2


# --- several processes, of which this is one --------------------------------------------------------------------------


class Twin(LocalWorld):
    """Worker 0 of two processes, of which the other one does the same."""

    processes = 2

    def __init__(self):
        super().__init__(1)
        WorkerSlots.__init__(self, 2)
        self.heard = []

    def exchange(self, message, ops, name=0):
        (own,) = message.parts
        return [accumulate(ops, own, own)], two_statuses(message.status)

    def all_gather_bytes(self, value, about="", more=""):
        return [value, value]

    def fail(self, why):
        self.heard.append(why)


def test_an_error_is_printed_while_it_waits_to_be_heard(monkeypatch, caplog):
    monkeypatch.setattr(_failure, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr(_failure, "PATIENCE_SECONDS", 0.05)
    world, data, over = Twin(), Broken(), threading.Event()
    with build(sgd, W, world=world, data=data) as program:
        program.step()
        data.bad = set(range(24))
        program._parts.stream._ahead, program._parts.stream._examples._kept = None, {}
        monkeypatch.setattr(Twin, "fail", lambda self, *args: over.wait())  # nobody answers
        with pytest.raises(OSError, match="is gone"):
            program.step()
    over.set()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("adaptive", "ERROR")
    assert "rank 0 failed in step 2 of program 1 ('sgd'): OSError: " in record.getMessage()
    assert "up to 0.05 s for the other ranks to receive this" in record.getMessage()


def test_a_reported_error_is_printed_once(caplog):
    world = Twin()
    with build(watched(Recorder(lambda o: 1 / 0)), world=world) as program, pytest.raises(ZeroDivisionError) as error:
        program.step()
    _failure.report_failure(world, "in the block around it", error.value)
    assert len(world.heard) == 1
    assert not caplog.records


def test_a_step_within_a_step_is_refused():
    """Called by a hook, or by another thread: both would take one state."""
    programs = []

    def again(observation):
        with pytest.raises(ad.DriverError, match=r"program 1 \('driver'\) is already in a step"):
            programs[0].step()

    def driver(state, batch):
        operators.hook("again", Recorder(again), (jnp.float32(0),))
        return sgd(state, batch)

    with build(driver, W) as program:
        programs.append(program)
        program.step()
        assert program.steps == 1
        program.step()  # and is free again
