"""Positions of a segment's inputs and results: of each kind, in order, without gaps."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive import operators
from adaptive.runtime.message import lay_out_all
from adaptive.runtime.segment_io import FinalResults, SegmentInputs, bytes_per_execution, part_slices
from tests.adaptive.drivers import Recorder, planned

STATE = {"kept": jnp.zeros(2), "new": jnp.zeros(3), "read": jnp.zeros(4), "unread": jnp.zeros(5), "w": jnp.zeros(())}


def driver(state, batch):
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


@pytest.fixture
def plan():
    return planned(driver, STATE)


def test_results_of_a_step_are_the_changed_state_operator_states_hooks_and_metrics(plan):
    names, found = plan.graph.state_names, FinalResults(plan)
    assert [names[i] for i in plan.changed_state] == ["state['new']", "state['w']"]
    assert [names[i] for i in found.overwritten] == ["state['w']"]
    assert [names[i] for i in found.read_only] == ["state['kept']", "state['read']", "state['unread']"]
    outputs = plan.final_outputs
    assert [outputs[place] for place in found.op_states] == [s.new for s in plan.op_states]
    assert [len(outputs[place]) for place in found.op_states] == [2, 1]
    assert [outputs[place] for place in found.hooks] == [h.values for h in plan.hooks]
    assert outputs[found.metrics] == plan.graph.metrics
    assert found.metrics.stop == len(outputs) == 2 + 3 + 4 + 2


def test_inputs_are_taken_from_their_places_in_the_state(plan):
    state, op_states = [f"leaf {i}" for i in range(5)], [["a0", "a1"], ["b0"]]
    first, second, final = (SegmentInputs(s) for s in (*plan.microbatches.values(), plan.final))
    assert first.of_state(state, op_states)["state"] == []
    assert (first.in_step, second.in_step, final.in_step) == (False, True, True)
    given = second.of_state(state, op_states)
    assert [given["state"], given["op_state"]] == [["leaf 2"], []]
    given = final.of_state(state, op_states)
    assert given["state"] == ["leaf 0", "leaf 2", "leaf 3", "leaf 4"]
    assert given["op_state"] == ["a0", "a1", "b0"]
    assert [first.messages, second.messages, final.messages] == [[], [0], [0, 1]]


def test_parts_follow_one_another_within_a_level():
    def several(state, batch):
        mean = batch["y"].mean()
        own = state["w"] + comm.all_reduce(mean, when=ad.step_number() % 2 == 0)
        usual = comm.all_reduce(batch["x"].sum(), op="sum") + comm.all_reduce(mean, op="max")
        later = comm.all_reduce((usual * batch["y"]).max(), op="max")
        return {**state, "w": own, "new": jnp.full(3, usual), "kept": jnp.full(2, later)}, {}

    plan = planned(several, STATE, local_state=[4])
    layouts = lay_out_all(plan.messages, capacity=2, status=0)
    assert [m.level for m in plan.messages] == [0, 0, 1]
    counts = [len(layout.parts) for layout in layouts]
    places = part_slices(plan, layouts)
    assert [(p.start, p.stop) for p in places] == [(0, counts[0]), (counts[0], counts[0] + counts[1]), (0, counts[2])]
    nbytes = [sum(4 * int(np.prod(p.shape)) for p in layout.parts) for layout in layouts]
    assert bytes_per_execution(plan, layouts) == nbytes[0] + nbytes[1] > nbytes[2]
