"""Steps: no size waits for a compiler once buckets are compiled, and one in which workers are lost is taken again."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from adaptive.base.process.signals import Interrupts
from adaptive.runtime.local_world import LocalWorld
from tests.problems import Compilations, build, descend, make_data, stream, warm
from tests.threaded_world import Job


def test_sizes_never_seen_compile_nothing_and_hold_from_the_next_step():
    """20 decisions of a hook, all of them new, each taken up by all workers in the very next step."""
    rng, n, asked = np.random.default_rng(0), 3, {}
    most = 2 << ((64 // n).bit_length() - 1)  # twice the largest bucket; for larger batches there are more

    def resize(control):
        sizes = control.batch_sizes
        while sizes in (control.batch_sizes, *asked.values()) or max(sizes) >= most:
            total = int(rng.integers(13, 64))
            cuts = np.sort(rng.choice(np.arange(1, total), n - 1, replace=False))
            sizes = tuple(int(s) for s in np.diff([0, *cuts, total]))
        control.rescale(global_batch=sum(sizes), shares=sizes)
        asked[control.step] = sizes

    def driver(state, batch):
        ctrl.hook(resize, every=3)
        state, metrics = descend(state, batch)
        ctrl.hook(lambda control, loss: None, metrics["loss"], name="watch")
        return state, metrics

    with build(driver, 0.0, make_data(), 64, world=LocalWorld(n), resizable=True) as program:
        warm(program)
        before = program.step()
        with Compilations() as compilations:
            reports = {r.step: r for r in program.run(steps=60)}
            assert compilations == []
            jax.jit(lambda x: x * 3)(np.ones(3))
            assert compilations  # so it would have been seen
    assert len(set(asked.values())) == len(asked) >= 20
    for step, sizes in asked.items():
        if step + 1 in reports:
            assert reports[step + 1].batch_sizes == sizes
    last = reports[max(reports)]
    for name in ("kernels", "compile_seconds", "waited_seconds"):
        assert getattr(last, name) == getattr(before, name)


@pytest.mark.parametrize("make", [LocalWorld, lambda: LocalWorld(2), comm.DeviceWorld])
def test_ctrl_c_while_the_state_is_overwritten_waits_until_the_step_is_counted(make, monkeypatch):
    """Its memory is the new state's: an interrupt in between would lose both."""

    def interrupted(run):
        return lambda *given: (run(*given), signal.raise_signal(signal.SIGINT))[0]

    options = {"world": make(), "deterministic": True}
    with build(descend, 0.0, make_data(), 16, **options) as program, build(descend, 0.0, make_data(), 16) as alone:
        for _ in range(5):
            program.step()
        engine, handler = program._parts.engine, signal.getsignal(signal.SIGINT)
        if engine.fused is None:
            final = engine.context.programs["final", 0, 0]
            engine.context.programs["final", 0, 0] = replace(final, run=interrupted(final.run))
            program._parts.revision.increment()
        else:
            monkeypatch.setattr(engine.fused._program, "run", interrupted(engine.fused._program.run))
        for step in (6, 7):
            with pytest.raises(KeyboardInterrupt):
                program.step()
            assert program.steps == step
        assert signal.getsignal(signal.SIGINT) is handler
        list(alone.run(steps=7))
        np.testing.assert_allclose(program.state, alone.state, rtol=1e-5)


def test_the_steps_of_a_check_leave_ctrl_c_as_it_was():
    handler = signal.getsignal(signal.SIGINT)
    with build(descend, 0.0, make_data(), 16) as program:
        program.check()
        assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_is_not_deferred():
    interrupts = Interrupts()
    interrupts.enabled = True
    interrupts.hold()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupts.release()
    assert not interrupts.held


# --- steps that are taken again ---------------------------------------------------------------------------------------

EXAMPLES, BATCH, STEPS, SEED = 60, 12, 5, 3
LAST = 3  # the step in whose message processes die
DATA = {"x": np.arange(EXAMPLES, dtype=np.float32), "number": np.arange(EXAMPLES)}
NUMBERS = stream(EXAMPLES, SEED, STEPS * BATCH)[(LAST - 1) * BATCH : LAST * BATCH]


def trained(dies):
    """Train on three processes, of which some die in message `LAST`. Returns the reports, the state, and the numbers of
    the examples that were computed in the step, by process.
    """

    def script(world):
        seen, on, (own,) = [], threading.Event(), world.workers

        def take(numbers):
            if on.is_set():
                seen.append(np.sort(numbers))
            return np.float32(0)

        def driver(state, batch):
            zero = jax.pure_callback(take, jax.ShapeDtypeStruct((), jnp.float32), batch["number"])
            drawn = jax.random.normal(ad.batch_key(), batch["x"].shape)  # by an example's place in the global batch
            value = (batch["x"] + zero + drawn).mean()
            mean = comm.all_reduce(value)
            taken = comm.all_reduce(jnp.zeros(EXAMPLES, jnp.int32).at[batch["number"]].add(1), op="sum")
            return {"taken": state["taken"] + taken, "sum": state["sum"] + mean}, {"there": ad.num_workers()}

        state = {"taken": jnp.zeros(EXAMPLES, jnp.int32), "sum": jnp.zeros(())}
        with build(driver, state, DATA, BATCH, world=world, seed=SEED) as program:
            warm(program)
            reports = []
            for report in program.run(steps=STEPS - 1):
                reports.append(report)
                if report.step == LAST - 1:
                    on.set()
                    if own in dies:  # at its next operation, or at the one after that
                        world.job.dies[own] = len(world.job.operations[own]) + dies[own]
                if report.step == LAST:
                    on.clear()
            return reports, program.state, seen

    return Job(3).run(script)


@pytest.fixture(scope="module")
def calm():
    """The state if nobody dies."""
    return trained({})[1][1]


def check_state(state, expected):
    np.testing.assert_array_equal(state["taken"], expected["taken"])
    np.testing.assert_allclose(state["sum"], expected["sum"], rtol=1e-6)


def test_the_step_is_taken_again_on_the_same_examples(calm):
    returned = trained({0: 0})
    again = np.concatenate([np.concatenate(seen)[4:] for _, _, seen in returned.values()])
    np.testing.assert_array_equal(np.sort(again), np.sort(NUMBERS))  # each of them once
    for reports, state, seen in returned.values():
        assert sum(map(len, seen)) == 4 + 6  # its own, and then half of all
        step = reports[LAST - 2]  # without the first one
        assert [loss.workers for loss in step.lost] == [(0,)]
        assert (step.batch_sizes, int(step.metrics["there"])) == ((0, 6, 6), 2)
        assert step.seconds >= sum(step.breakdown) * 0.99
        check_state(state, calm)


def test_another_one_may_be_lost_when_it_is_taken_again(calm):
    ((reports, state, seen),) = trained({0: 0, 1: 1}).values()
    assert [loss.workers for loss in reports[LAST - 2].lost] == [(0,), (1,)]
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)[-BATCH:]), np.sort(NUMBERS))
    check_state(state, calm)
