"""A step in which workers are lost is taken again as a whole, on the same examples, by the others."""

from __future__ import annotations

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import monitors as mon
from tests.program.problems import stream, warm
from tests.threaded_world import Job

EXAMPLES, BATCH, STEPS, SEED = 60, 12, 5, 3
LAST = 3  # the step in whose message processes die
DATA = {"x": np.arange(EXAMPLES, dtype=np.float32), "number": np.arange(EXAMPLES)}


def trained(dies, *, driver=None, deterministic=False):
    """Train on three processes, of which some die in message `LAST`. Returns the reports, the state, and the numbers of
    the examples that were computed in the step, by process.
    """
    found = {}

    def script(world):
        seen, on = [], threading.Event()

        def take(numbers):
            if on.is_set():
                seen.append(np.sort(numbers))
            return np.float32(0)

        def train(state, batch):
            zero = jax.pure_callback(take, jax.ShapeDtypeStruct((), jnp.float32), batch["number"])
            return (driver or plain)(state, {**batch, "x": batch["x"] + zero})

        state = {"taken": jnp.zeros(EXAMPLES, jnp.int32), "sum": jnp.zeros(())}
        options = {"global_batch": BATCH, "seed": SEED, "deterministic": deterministic, "resizable": deterministic}
        with ad.Program(train, state, DATA, world=world, **options) as program:
            warm(program)
            reports = []
            for report in program.run(steps=STEPS - 1):
                reports.append(report)
                if report.step == LAST - 1:
                    on.set()
                    if world.workers[0] in dies:  # at its next operation, or at the one after that
                        at = len(world.job.operations[world.workers[0]]) + dies[world.workers[0]]
                        world.job.dies[world.workers[0]] = at
                if report.step == LAST:
                    on.clear()
                    found[world.workers[0]] = list(seen)
            return reports, program.state

    returned = Job(3).run(script)
    return returned, found


@functools.cache
def calm(driver=None, deterministic=False):
    """As `trained` where nobody dies: the reports and the state of process 1."""
    return trained({}, driver=driver, deterministic=deterministic)[0][1]


def plain(state, batch):
    drawn = jax.random.normal(ad.batch_key(), batch["x"].shape)  # of each example by its place in the global batch
    own = (batch["x"] + drawn).mean()
    mean = comm.all_reduce(own)
    taken = comm.all_reduce(jnp.zeros(EXAMPLES, jnp.int32).at[batch["number"]].add(1), op="sum")
    metrics = {"noise": mon.noise_scale({"w": own}, {"w": mean}).scale, "there": ad.num_workers()}
    return {"taken": state["taken"] + taken, "sum": state["sum"] + mean}, metrics


def counting(state, batch):
    """What this computes of a batch depends on the number of workers."""
    new, metrics = plain(state, {**batch, "x": batch["x"] * ad.num_workers().astype(jnp.float32)})
    return {**new, "sum": new["sum"] * 0}, metrics


NUMBERS = stream(EXAMPLES, SEED, STEPS * BATCH)[(LAST - 1) * BATCH : LAST * BATCH]


@pytest.mark.parametrize(
    ("who", "options"),
    [
        pytest.param(0, {}, id="rank 0"),
        pytest.param(1, {"driver": counting}, id="counts workers", marks=pytest.mark.long),
        pytest.param(2, {"deterministic": True}, id="deterministic", marks=pytest.mark.long),
    ],
)
def test_the_step_is_taken_again_on_the_same_examples(who, options):
    _, expected = calm(options.get("driver"), options.get("deterministic", False))
    returned, computed = trained({who: 0}, **options)
    again = np.concatenate([np.concatenate(computed[process])[4:] for process in returned])
    np.testing.assert_array_equal(np.sort(again), np.sort(NUMBERS))  # each of them once
    for process, (reports, state) in returned.items():
        assert sum(map(len, computed[process])) == 4 + 6  # its own, and then half of all
        step = reports[LAST - 2]  # without the first one
        assert [loss.workers for loss in step.lost] == [(who,)]
        assert step.batch_sizes == tuple(0 if slot == who else 6 for slot in range(3))
        assert step.metrics["there"] == 2
        np.testing.assert_array_equal(state["taken"], expected["taken"])
        np.testing.assert_allclose(state["sum"], expected["sum"], rtol=1e-6)
        assert step.seconds >= sum(step.breakdown) * 0.99
        if not options:
            noise = [report.metrics["noise"] for report in (reports[-1], calm()[0][-1])]
            assert len(set(np.isfinite(noise))) == 1


def test_another_one_may_be_lost_when_it_is_taken_again():
    returned, computed = trained({0: 0, 1: 1})
    ((reports, state),) = returned.values()
    assert [loss.workers for loss in reports[LAST - 2].lost] == [(0,), (1,)]
    np.testing.assert_array_equal(np.sort(np.concatenate(computed[2])[-BATCH:]), np.sort(NUMBERS))
    np.testing.assert_array_equal(state["taken"], calm()[1]["taken"])
    np.testing.assert_allclose(state["sum"], calm()[1]["sum"], rtol=1e-6)


@pytest.mark.long
def test_two_may_be_lost_at_once():
    returned, computed = trained({1: 0, 2: 0})
    ((_, state),) = returned.values()
    assert sum(map(len, computed[0])) == 4 + BATCH
    np.testing.assert_allclose(state["sum"], calm()[1]["sum"], rtol=1e-6)
