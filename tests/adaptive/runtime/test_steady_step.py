"""The common step and the general one: the same bits, the same decisions, the same reports."""

from __future__ import annotations

import sys
import threading
from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from adaptive.data import stream
from adaptive.runtime import copied_examples
from adaptive.runtime import steady_step as _steady_step
from adaptive.runtime.copied_examples import CopiedExamples
from adaptive.runtime.finite import FiniteCheck
from adaptive.runtime.memory import has_room
from adaptive.runtime.segment import Feed
from adaptive.runtime.steady_step import SteadyStep
from tests.relaxed import relaxed_tx

COVERS = (
    "adaptive/program/step_checks.py",
    "adaptive/runtime/copied_examples.py",
    "adaptive/runtime/segment.py",
    "adaptive/runtime/step_plan.py",
)

DATA = {
    "x": np.random.default_rng(0).normal(size=(128, 6)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=128).astype(np.float32),
}
ADAM = relaxed_tx(optax.adam(0.01))
LOCAL = {"seconds", "breakdown", "compute_seconds", "kernels", "compile_seconds", "waited_seconds"}  # of the machine


def begun():
    params = {"w": jnp.linspace(-1.0, 1.0, 6), "b": jnp.zeros(())}
    return {"params": params, "opt": ADAM.init(params), "unused": jnp.ones(3), "steps": jnp.zeros((), jnp.int32)}


def loss_of(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def plain(state, batch):
    loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
    return updated(state, comm.all_reduce(grads)), {"loss": comm.all_reduce(loss)}


def updated(state, grads):
    updates, opt = ADAM.update(grads, state["opt"])
    params = optax.apply_updates(state["params"], updates)
    return {**state, "params": params, "opt": opt, "steps": state["steps"] + 1}


def monitored(state, batch):
    loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
    mean = comm.all_reduce(grads)
    loss = comm.all_reduce(loss)
    smooth = mon.ema(loss, 0.9)
    ctrl.hook(grow, loss, comm.all_gather(mon.compute_seconds()), every=3)
    return updated(state, mean), {"smooth": smooth, "largest": comm.all_reduce(jnp.abs(batch["x"]).max(), op="max")}


def grow(control, loss, seconds):
    if control.step == 6:
        control.rescale(global_batch=24)


def averaged_now_and_then(state, batch):
    grads = jax.grad(loss_of)(state["params"], batch)
    return {**state, "local": comm.all_reduce(grads, when=ad.step_number() % 2 == 0)}, {}


def two_levels(state, batch):
    grads = comm.all_reduce(jax.grad(loss_of)(state["params"], batch))
    norm = optax.tree.norm(grads)
    return updated(state, grads), {"spread": comm.all_reduce(jnp.mean(batch["x"]) * norm)}


def spoilt(state, batch):
    """Not finite in some steps, which are skipped."""
    loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
    grads = jax.tree.map(lambda g: jnp.where(ad.step_number() % 4 == 2, jnp.nan, g), grads)
    return updated(state, comm.all_reduce(grads)), {"loss": comm.all_reduce(loss)}


def compared(state, batch):
    """A lone worker makes two calls of its batch, as a noise scale compares groups of examples."""
    loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
    mean = comm.all_reduce(grads)
    return updated(state, mean), {"noise": mon.noise_scale(grads, mean).scale, "loss": comm.all_reduce(loss)}


def trained(driver, steps=14):
    state, options = begun(), {"deterministic": True, "nonfinite": "skip", "resizable": driver is monitored}
    if driver is averaged_now_and_then:
        state["local"] = state["params"]
        options["per_worker_state"] = lambda state: state["local"]
    with ad.Program(driver, state, DATA, global_batch=16, **options) as program:
        reports = [program.step() for _ in range(steps)]
        return reports, program.state


def test_a_decision_without_effect_transfers_nothing(monkeypatch):
    measured = []
    measure = Feed.measure
    monkeypatch.setattr(Feed, "measure", lambda self, reading: measured.append(reading.step) or measure(self, reading))

    def hooked(state, batch):
        state, metrics = plain(state, batch)
        ctrl.hook(lambda control, loss: None, metrics["loss"], every=5)
        return state, metrics

    with ad.Program(hooked, begun(), DATA, global_batch=16, resizable=False) as program:
        list(program.run(steps=4))
        before = len(measured)
        list(program.run(steps=40))
    assert len(measured) == before


@pytest.mark.parametrize("driver", [plain, monitored, averaged_now_and_then, two_levels, spoilt, compared])
def test_both_give_the_same_states_reports_and_decisions(driver, monkeypatch):
    taken = []
    take = SteadyStep.__call__
    monkeypatch.setattr(SteadyStep, "__call__", lambda self, *args: taken.append(1) or take(self, *args))
    steady = trained(driver)
    assert bool(taken) == (driver in (plain, monitored, spoilt, compared)), taken
    monkeypatch.setattr(SteadyStep, "fits", lambda self, choice: False)
    taken.clear()
    general = trained(driver)
    assert not taken
    for mine, other in zip(steady[0], general[0], strict=True):
        assert vars(mine).keys() == vars(other).keys() == {field.name for field in fields(ad.Report)}
        for field in fields(mine):
            if field.name not in LOCAL:
                same(getattr(mine, field.name), getattr(other, field.name))
    same(steady[1], general[1])
    assert driver is not spoilt or sum(report.skipped for report in steady[0]) == 3
    assert driver is not monitored or {report.global_batch for report in steady[0]} == {16, 24}
    assert driver is not compared or {report.microbatches for report in steady[0]} == {((8, 8),)}


def same(mine, other):
    assert jax.tree.structure(mine) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True):
        if isinstance(a, str):
            assert a == b
        else:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def calls_of_a_step(driver, steps=50, **options):
    """Calls in Python of one steady step. A count, which is the same however fast the machine is."""
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    # The seed is given, as looking up the order of examples takes a few calls more or less by it.
    with ad.Program(driver, begun(), DATA, global_batch=16, seed=0, **options) as program:
        run = program.run(steps=20 + steps)
        for _ in range(20):
            next(run)
        sys.setprofile(count)
        for _ in range(steps):
            next(run)
        sys.setprofile(None)
    return calls / steps


def test_a_steady_step_makes_few_calls_in_python():
    assert calls_of_a_step(plain, resizable=False, deterministic=True) < MOST_CALLS


MOST_CALLS = 50


@pytest.mark.parametrize("driver", [plain, monitored, compared, spoilt])
def test_microbatches_dispatched_ahead_give_the_same_results(driver, monkeypatch):
    """As on an accelerator; a checkpoint, other hyperparameters and a restore in between change nothing of it."""
    expected = trained(driver)
    taken, checked = [], []
    begin, take, dispatch = SteadyStep.__init__, SteadyStep._take_ahead, FiniteCheck.dispatch
    monkeypatch.setattr(
        FiniteCheck, "dispatch", lambda self, parts: checked.append(dispatch(self, parts)) or checked[-1]
    )
    monkeypatch.setattr(SteadyStep, "__init__", lambda self, engine: begin(self, engine) or on_a_device(self))
    monkeypatch.setattr(SteadyStep, "_take_ahead", lambda self, *args: taken.append(take(self, *args)) or taken[-1])
    reports, state = trained(driver)
    assert sum(ahead is not None for ahead in taken) >= 6
    assert len(checked) >= len(taken)  # with the kernels, not after the exchange
    assert driver is not spoilt or [report.skipped for report in reports] == [r.skipped for r in expected[0]]
    assert all(min(report.breakdown) >= 0 for report in reports)
    same([report.metrics for report in reports], [report.metrics for report in expected[0]])
    same(state, expected[1])


def on_a_device(steady):
    steady.runs_ahead, steady._on_host = True, False
    if steady._check is not None:
        steady._check, steady._checks_own = FiniteCheck(steady._check.layout, "gpu"), True


@pytest.mark.parametrize(("driver", "slow"), [(plain, False), (plain, True), (monitored, False), (compared, False)])
def test_examples_are_copied_to_the_device_before_their_step(driver, slow, monkeypatch):
    """As on an accelerator, from the program's thread or from the one that reads; not for several microbatches."""
    expected, used, threads = trained(driver), [], set()
    begin, compute, copy = SteadyStep.__init__, SteadyStep.compute, CopiedExamples.copy

    def copies(self, batches):
        threads.add(threading.current_thread())
        copy(self, batches)

    def computes(self, sizes, reading, vectors, leaves):
        used.append(all(isinstance(leaf, jax.Array) for leaf in leaves))
        return compute(self, sizes, reading, vectors, leaves)

    monkeypatch.setattr(copied_examples, "COPIED_BYTES", 0)
    monkeypatch.setattr(stream, "_SMALL", -1 if slow else 1 << 20)
    monkeypatch.setattr(CopiedExamples, "copy", copies)
    monkeypatch.setattr(SteadyStep, "__init__", lambda self, ctx: begin(self, ctx) or on_a_device(self))
    monkeypatch.setattr(SteadyStep, "compute", computes)
    reports, state = trained(driver)
    assert (sum(used) >= 4) == (driver is not compared), used
    assert (threading.main_thread() in threads) != slow
    same([report.metrics for report in reports], [report.metrics for report in expected[0]])
    same(state, expected[1])


def test_few_examples_are_copied_when_their_kernel_is_dispatched(monkeypatch):
    begin, steps = SteadyStep.__init__, []
    monkeypatch.setattr(
        SteadyStep, "__init__", lambda self, ctx: begin(self, ctx) or on_a_device(self) or steps.append(self)
    )
    trained(plain)
    assert steps
    assert all(step.copied.wanted and step.copied.last is None for step in steps)


def test_dispatched_microbatches_are_dropped_if_the_state_changes(monkeypatch):
    begin = SteadyStep.__init__
    monkeypatch.setattr(SteadyStep, "__init__", lambda self, engine: begin(self, engine) or on_a_device(self))
    with ad.Program(plain, begun(), DATA, global_batch=16, deterministic=True) as program:
        for _ in range(4):
            program.step()
        kept = program.checkpoint()
        after = [float(program.step().metrics["loss"]) for _ in range(3)]
        program.restore(kept)
        assert [float(program.step().metrics["loss"]) for _ in range(3)] == after
        program.restore(kept)
        program.rescale(global_batch=32)
        assert program.step().global_batch == 32


def test_dispatched_microbatches_are_dropped_by_a_general_step(monkeypatch):
    """In the last step of a run; the next run starts at its end."""

    def losses():
        with ad.Program(plain, begun(), DATA, global_batch=16, deterministic=True) as program:
            found = [report.metrics["loss"] for report in program.run(steps=5)]
            with monkeypatch.context() as patched:
                patched.setattr(SteadyStep, "fits", lambda self, choice: False)
                found.append(next(program.run(steps=6)).metrics["loss"])
            return [float(loss) for loss in (*found, *(program.step().metrics["loss"] for _ in range(3)))]

    expected, begin = losses(), SteadyStep.__init__
    monkeypatch.setattr(SteadyStep, "__init__", lambda self, engine: begin(self, engine) or on_a_device(self))
    assert losses() == expected


class Device:
    """A device by what it says of its memory."""

    def __init__(self, stats):
        self.memory_stats = lambda: stats


@pytest.mark.parametrize(
    ("stats", "room"),
    [
        (None, True),
        ({"bytes_limit": 1000, "peak_bytes_in_use": 600}, True),
        ({"bytes_limit": 1000, "peak_bytes_in_use": 601}, False),
        ({"bytes_limit": 0, "peak_bytes_in_use": 601}, True),  # CUDA's own allocator
    ],
)
def test_there_is_room_where_four_times_as_much_was_never_used(stats, room):
    assert has_room(Device(stats), 100) == room


def test_nothing_is_dispatched_ahead_where_there_is_no_room_for_it(monkeypatch):
    begin, asked = SteadyStep.__init__, []
    monkeypatch.setattr(SteadyStep, "__init__", lambda self, engine: begin(self, engine) or on_a_device(self))
    monkeypatch.setattr(SteadyStep, "dispatch_ahead", None)
    monkeypatch.setattr(_steady_step, "has_room", lambda device, nbytes: asked.append(nbytes))
    with ad.Program(plain, begun(), DATA, global_batch=16, deterministic=True) as program:
        for _ in range(4):
            program.step()
        assert not program._parts.engine._steady.runs_ahead
        sent = sum(layout.nbytes for layout in program._parts.engine.layouts)
    assert asked == [sent + 16 * (6 + 1) * 4]  # and the examples that are copied
