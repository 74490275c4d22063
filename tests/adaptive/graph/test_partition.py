"""The partition of a driver into segments and messages, equal for every batch size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import adaptive as ad
import collectives as comm
from adaptive.graph.flow import Scope
from adaptive.operators.sources import Source, read
from tests.adaptive.drivers import FEATURES, mean_loss, planned, pointed_at

W = jnp.zeros(FEATURES)
SECONDS = Source("seconds", lambda r: r.compute_seconds)
grad = jax.grad(mean_loss)


def levels(plan):
    return {
        "microbatches": sorted(plan.microbatches),
        "prologues": sorted(plan.prologues),
        "messages": len(plan.messages),
    }


def origins(segment, kind):
    return [o for _, o in segment.inputs if o.kind == kind]


def sgd(state, batch):
    loss, grads = jax.value_and_grad(mean_loss)(state, batch)
    return state - 0.1 * comm.all_reduce(grads), {"loss": comm.all_reduce(loss)}


# --- segments and messages --------------------------------------------------------------------------------------------


def test_a_gradient_step_has_one_microbatch_segment_one_message_and_the_final_segment():
    plan = planned(sgd, W)
    assert levels(plan) == {"microbatches": [0], "prologues": [], "messages": 1}
    assert [c.how.label for c in plan.messages[0]] == ["mean", "mean"]
    assert plan.sent_at(0) == (0,)
    assert 0 in plan.microbatches
    assert plan.microbatches[0].outputs == ()  # nothing is kept in memory for later
    assert origins(plan.final, "batch") == origins(plan.final, "microbatch") == []
    assert origins(plan.microbatches[0], "message") == []
    assert plan.splittable


def test_what_only_a_weight_depends_on_is_sent_before():
    def driver(state, batch):
        loudest = comm.all_reduce(jnp.abs(batch["y"]).max(), op="max")
        return state, {"loss": comm.all_reduce(batch["y"].sum(), weight=1 + loudest)}

    plan = planned(driver, W)
    assert [[c.how.about for c in message] for message in plan.messages] == [
        ["all_reduce(op='max')"],
        ["all_reduce(op='mean')"],
    ]


def test_everything_of_one_level_travels_in_one_message():
    def driver(state, batch):
        loss, grads = jax.value_and_grad(mean_loss)(state, batch)
        sent = comm.all_reduce(grads)
        seconds = comm.all_gather(read(SECONDS))
        worst = comm.all_reduce(loss, op="max")
        count = comm.all_reduce(batch["y"].sum(), op="sum")
        weighted = comm.all_reduce(loss, weight=jnp.abs(batch["y"]).sum())
        first = comm.broadcast(read(SECONDS), 1)
        return state - sent, {"s": seconds, "m": worst, "c": count, "w": weighted, "f": first}

    plan = planned(driver, W)
    assert len(plan.messages) == 1
    found = [(c.how.about, c.scope) for c in plan.messages[0]]
    assert found == [
        ("all_reduce(op='mean')", Scope.MICROBATCH),
        ("all_gather", Scope.WORKER),
        ("all_reduce(op='max')", Scope.MICROBATCH),
        ("all_reduce(op='sum')", Scope.MICROBATCH),
        ("all_reduce(op='mean')", Scope.MICROBATCH),
        ("broadcast from 1", Scope.WORKER),
    ]
    assert [s.name for s in plan.sources] == ["examples", "seconds"]


@pytest.mark.parametrize(
    "again",
    [
        comm.all_reduce,
        lambda x: comm.all_reduce(x, op="sum"),
        lambda x: comm.all_gather(x)[0],
        lambda x: comm.all_reduce(x, weight=read(SECONDS)),
    ],
)
def test_a_collective_of_a_replicated_value_sends_nothing(again):
    def driver(state, batch):
        return state - again(again(comm.all_reduce(grad(state, batch)))), {"w": again(state), "one": again(1.0)}

    plan = planned(driver, W)
    assert len(plan.messages) == 1
    assert [c.how.name for c in plan.messages[0]] == ["all_reduce"]
    assert "seconds" not in [s.name for s in plan.sources]


def test_a_free_collective_waits_for_its_values_and_not_for_its_weight():
    def driver(state, batch):
        unused = comm.all_reduce(batch["y"].mean())
        same = comm.all_reduce(state, weight=unused)
        return state + comm.all_reduce(same * batch["y"].mean()), {}

    plan = planned(driver, 0.0)
    assert levels(plan) == {"microbatches": [0], "prologues": [], "messages": 1}
    assert len(plan.messages[0]) == 1


def test_unchanged_state_is_passed_through():
    def driver(state, batch):
        return {"table": state["table"], "w": state["w"] - comm.all_reduce(grad(state["w"], batch))}, {}

    plan = planned(driver, {"table": jnp.arange(5.0), "w": W})
    assert plan.changed_state == (1,)
    assert len(plan.final_outputs) == 1


def test_a_learning_rate_is_recomputed_after_the_message():
    def driver(state, batch):
        rate = 0.1 / (1 + state["step"].astype(float))
        step = rate * comm.all_reduce(rate * grad(state["w"], batch))
        return {"w": state["w"] - step, "step": state["step"] + 1}, {}

    plan = planned(driver, {"w": W, "step": 0})
    assert plan.microbatches[0].outputs == ()
    assert {o.index for o in origins(plan.final, "state")} == {0, 1}


def test_of_one_level_the_message_that_is_always_sent_comes_last():
    def driver(state, batch):
        mean, even, third = batch["y"].mean(), ad.step_number() % 2 == 0, ad.step_number() % 3 == 0
        gated = comm.all_reduce(mean, when=even) + comm.all_reduce(2 * mean, when=even)
        usual, own = comm.all_reduce(3 * mean), comm.local_mean(4 * mean)
        return (state[0] + usual, state[1] + own + gated + comm.all_reduce(mean, when=third)), {}

    plan = planned(driver, (0.0, 0.0), local_state=[1])
    found = [(m.travels, m.gate) for m in plan.messages]
    assert found == [(False, None), (True, 0), (True, 1), (True, None)]
    assert plan.sent_at(0) == (0, 1, 2, 3)
    assert [len(m) for m in plan.messages] == [1, 2, 1, 1]
    conditions = [plan.prologues[0].outputs[gate] for _, gate in found[1:3]]
    assert conditions == [m.contributions[0].when for m in plan.messages[1:3]]


# --- effects ----------------------------------------------------------------------------------------------------------


def noted(value, *, ordered=False):
    io_callback(lambda _: None, None, value, ordered=ordered)


def effects_of(plan):
    segments = [*plan.prologues.values(), *plan.microbatches.values(), plan.final]
    return {(s.kind, s.level): n for s in segments if (n := sum("callback" in e.primitive.name for e in s.eqns))}


def test_each_effect_and_question_to_the_host_is_in_the_first_segment_that_knows_its_operands():
    def driver(state, batch):
        noted(state)
        noted(batch["y"])
        mean = comm.all_reduce(batch["y"].mean())
        asked = ad.replicated(jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), jnp.float32), state))
        noted(mean)
        second = comm.all_reduce((batch["y"] * mean * asked).max(), op="max")
        noted(batch["y"] - mean)
        return state + second + asked, {"asked": 2 * asked}

    plan = planned(driver, 0.0)
    once, each = "prologue", "microbatch"
    assert effects_of(plan) == {(once, 0): 2, (each, 0): 1, (once, 1): 1, (each, 1): 1}
    assert len(origins(plan.final, "prologue")) == 1  # asked once, and kept


@pytest.mark.parametrize(
    ("kinds", "in_order"),
    [
        (("state", "batch"), True),
        (("state", "batch", "mean"), True),
        (("batch", "state"), False),
        (("mean", "batch"), False),
    ],
)
def test_ordered_effects_that_would_run_in_another_order_are_refused(kinds, in_order):
    def driver(state, batch):
        mean = comm.all_reduce(batch["y"].mean())
        values = {"state": state, "batch": batch["y"], "mean": mean}
        noted(state[None])  # those without an order do not matter
        for kind in kinds:
            noted(values[kind], ordered=True)
        noted(state[None])
        return state + mean, {}

    if in_order:
        assert sum(effects_of(planned(driver, 0.0)).values()) == len(kinds) + 2
    else:
        with pytest.raises(ad.DriverError, match="would run before an earlier one") as caught:
            planned(driver, 0.0)
        assert "io_callback" in pointed_at(caught.value)[0]


def test_what_is_computed_once_a_step_must_be_the_same_for_every_size():
    def driver(state, batch):
        residuals = batch["x"] @ state - batch["y"]
        first = comm.all_reduce(residuals.mean())
        moved = state + first
        second = comm.all_reduce((batch["x"] @ moved - residuals).mean())
        seconds = comm.all_reduce(read(SECONDS) * second, op="max")
        return moved - second, {"seconds": seconds}

    plan = planned(driver, W)
    (moved,), (residuals,) = plan.prologues[1].outputs, plan.microbatches[0].outputs
    fixed = set(plan.fixed)
    assert moved in fixed
    assert residuals not in fixed
    assert set(plan.final_outputs) <= fixed
    sent = {c.value for m in plan.messages for c in m if c.scope < Scope.MICROBATCH}
    assert sent
    assert sent <= fixed
    assert fixed.isdisjoint(c.value for m in plan.messages for c in m if c.scope == Scope.MICROBATCH)


# --- two messages -----------------------------------------------------------------------------------------------------


def sharpness_aware(state, batch):
    """Foret et al. 2021: a gradient at the parameters moved along the mean gradient."""
    first = comm.all_reduce(grad(state, batch))
    moved = state + 0.05 * first / jnp.linalg.norm(first)
    return state - 0.1 * comm.all_reduce(grad(moved, batch)), {}


def test_a_second_gradient_at_moved_parameters_is_a_second_segment():
    plan = planned(sharpness_aware, W)
    assert levels(plan) == {"microbatches": [0, 1], "prologues": [1], "messages": 2}
    (moved,) = plan.prologues[1].outputs
    assert moved.aval.shape == (FEATURES,)
    assert origins(plan.microbatches[1], "prologue") == [("prologue", 1, 0)]
    assert origins(plan.microbatches[1], "message") == []  # moved once per worker, and not once per call
    assert origins(plan.final, "batch") == []
    assert plan.sent_at(1) == (1,)
    assert 1 in plan.microbatches
    assert plan.splittable
