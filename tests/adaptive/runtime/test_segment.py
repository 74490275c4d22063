"""Segments as functions, and the places of sources in the vectors that they receive."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive import operators
from adaptive.operators import sources
from adaptive.operators.sources import Reading, Source, read
from adaptive.runtime.message import lay_out_all
from adaptive.runtime.segment import Feed, apply, segment_function
from tests.adaptive.drivers import Recorder, planned

SECONDS = Source("seconds", lambda r: r.compute_seconds)
READING = Reading(
    step=7,
    seed=11,
    worker=2,
    global_batch=40,
    batch_size=10,
    examples=10,
    microbatches=1,
    offset=20,
    compute_seconds=0.25,
    iteration_seconds=0.5,
    taking_part=np.array([True, False, True]),
)
USED = (sources.STEP, sources.EXAMPLES, SECONDS, sources.OFFSET, sources.WORKER, sources.MICROBATCHES, sources.WORKERS)


@pytest.fixture
def feed():
    """Of a driver that reads sources of each dtype and scope."""

    def driver(state, batch):
        total = sum(read(source).astype(float) for source in USED)
        return state, {"all": comm.all_reduce(total * batch["y"].sum(), op="sum")}

    return Feed.of(planned(driver, 0.0, workers=3))


def test_a_step_has_the_sources_of_all_its_microbatches_and_each_has_its_own(feed):
    floats, ints = feed.measure(READING, 3)
    assert (floats.dtype, ints.dtype) == (np.float32, np.int32)
    assert ints[0] == READING.worker  # where segments read it
    assert np.asarray(feed.taking_part(jnp.asarray(ints))).tolist() == READING.taking_part.tolist()
    whole = {"step": 7, "seconds": 0.25, "worker": 2, "workers": 2, "examples": 10, "offset": 20, "microbatches": 3}
    assert {name: float(value) for name, value in feed.values(floats, ints).items()} == whole
    own = {name: float(value) for name, value in feed.values_of_microbatch(floats, ints, 4, 6).items()}
    assert own == {**whole, "examples": 4, "offset": 26, "microbatches": 1}


@pytest.mark.parametrize(
    ("collective", "gates", "result"),
    [
        (lambda x, **when: comm.all_reduce(x, **when), (), 3.0),
        (lambda x, **when: comm.all_reduce(x, op="sum", **when), (), 6.0),
        (lambda x, **when: comm.all_reduce(x, op="max", **when), (), 3.0),
        (lambda x, **when: comm.all_gather(x), (), [3.0, np.nan, 3.0]),
        (lambda x, **when: comm.all_reduce(x, op="sum", **when), (True,), 6.0),
        (lambda x, **when: comm.all_reduce(x, op="sum", **when), (False,), 3.0),
    ],
)
def test_a_collective_of_replicated_values_counts_the_workers_that_take_part(collective, gates, result):
    def driver(state, batch):
        when = {"when": ad.step_number() > 3} if gates else {}
        return state, {"found": collective(2.0 * state, **when)}

    eqns = planned(driver, 0.0, workers=3).graph.eqns
    eqn = next(e for e in eqns if e.primitive.name == "collective")
    (found,) = apply(eqn, [jnp.float32(3), *map(jnp.asarray, gates)], jnp.asarray(READING.taking_part))
    np.testing.assert_array_equal(found, result)


def several_results(state, batch):
    """Two levels of messages, two operator states of several leaves, two hooks, and metrics."""
    mean = comm.all_reduce(batch["y"].mean())
    most = comm.all_reduce((batch["y"] * mean + state["read"][0]).max(), op="max")
    for label, n in (("a", 2), ("b", 1)):
        init = [np.zeros(()) for _ in range(n)]
        operators.operator_state(label, init, lambda old: ([x + mean for x in old], None))
    operators.hook("one", Recorder(), (mean, state["read"], most))
    operators.hook("two", Recorder(), (most,))
    new = {**state, "new": jnp.full(3, mean), "w": state["w"] + most * state["read"].sum()}
    return new, {"mean": mean, "steps": ad.step_number()}


def test_the_memory_of_what_a_step_replaces_is_given_to_the_results_in_order():
    state = {name: jnp.zeros(n) for n, name in enumerate(("kept", "new", "read", "unread"), 2)} | {"w": jnp.zeros(())}
    plan = planned(several_results, state)
    layouts = lay_out_all(plan.messages, capacity=2, status=0)
    final = segment_function(plan, plan.final, Feed.of(plan), layouts)
    assert len(final.results) == len(plan.final_outputs) == len(set(final.results))
    replaced = [("state", 4, 0), ("op_state", 0, 0), ("op_state", 0, 1), ("op_state", 1, 0)]
    assert final.arguments[: final.donated] == tuple(replaced)  # "new" is not read
    assert final.results[:5] == (("state", 1, 0), *replaced)
    first, second = (segment_function(plan, s, Feed.of(plan), layouts) for s in plan.microbatches.values())
    assert (first.donated, second.donated) == (0, 0)
    assert ("state", 2, 0) in second.arguments
    assert ("state", 2, 0) not in first.arguments
