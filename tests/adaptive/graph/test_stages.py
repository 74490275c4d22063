"""A microbatch segment in stages computes what it does as one program, and each message as early as it can be known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.extend.core import Literal

import adaptive as ad
import collectives as comm
from adaptive.base.jaxprs import bind
from adaptive.graph.flow import Scope
from adaptive.graph.stages import always_sent, choose, work
from adaptive.operators.replication_claims import assert_scope_p
from adaptive.operators.sources import read
from tests.adaptive.drivers import FEATURES, planner
from tests.adaptive.graph.test_partition import SECONDS

LAYERS, WIDTH = 4, FEATURES
STATE = {"in": jnp.ones((FEATURES, WIDTH)), "layers": [jnp.eye(WIDTH)] * LAYERS, "out": jnp.ones(WIDTH)}
BATCH = {"x": np.arange(4 * FEATURES, dtype=np.float32).reshape(4, FEATURES), "y": np.ones(4, np.float32)}


def loss_of(params, batch):
    x = batch["x"] @ params["in"]
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer)
    return ((x @ params["out"] - batch["y"]) ** 2).mean()


def training(state, batch):
    """Besides the gradients, sends a loss, a measurement, a square of the gradients, and what stays on its worker.

    The host is shown the gradient that is known last.
    """
    loss, grads = jax.value_and_grad(loss_of)(state, batch)
    square = sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))
    own = comm.local_mean(loss)
    io_callback(lambda _: None, None, grads["in"])
    sent = comm.all_reduce({"grads": grads, "square": square, "loss": loss})
    centered = comm.all_reduce((loss * batch["y"] - sent["loss"]).max() + comm.all_reduce(own), op="max")
    new = jax.tree.map(lambda w, g: w - 0.1 * g, state, sent["grads"])
    return new, {"rest": (sent["square"], centered), "seconds": comm.all_reduce(read(SECONDS), op="max")}


def in_stages(most):
    plans = planner(training, STATE)
    whole = plans.begin(4)
    return whole, plans.cut_in_stages(choose(whole, most))


def computed(eqns, env):
    def value(atom):
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in eqns:
        operands = [value(a) for a in eqn.invars]
        results = operands if eqn.primitive is assert_scope_p else bind(eqn, operands)
        env.update(zip(eqn.outvars, results, strict=True))
    return value


def heavy(segment):
    return sum(eqn.primitive.name in ("dot_general", "tanh") for eqn in segment.eqns)


@pytest.mark.parametrize("most", [2, 3, 5, 50])
def test_stages_compute_what_the_segment_does(most):
    whole, plan = in_stages(most)
    segment, stages = whole.microbatches[0], plan.stages[0]
    assert 1 < len(stages) <= most
    rng = np.random.default_rng(0)
    given = {var: jnp.asarray(rng.normal(size=var.aval.shape), var.aval.dtype) for var, _ in segment.inputs}
    plain = computed(segment.eqns, dict(given))
    outputs = []
    for stage in stages:
        assert stage.segment.inputs[: len(segment.inputs)] == segment.inputs
        crossing = stage.segment.inputs[len(segment.inputs) :]
        assert [o.index for _, o in crossing] == list(range(len(stage.takes)))
        assert all(origin.kind == "crossing" for _, origin in crossing)
        taken = [outputs[number][i] for number, i in stage.takes]  # of earlier stages
        value = computed(stage.segment.eqns, {**given, **{var: x for (var, _), x in zip(crossing, taken, strict=True)}})
        outputs.append([value(a) for a in stage.segment.outputs])
        for number in stage.messages:
            for c in plan.messages[number]:
                for atom in filter(None, (c.value, c.weight)):
                    np.testing.assert_array_equal(value(atom), plain(atom))
    kept = [outputs[number][i] for number, i in stages[0].kept]
    assert [stage.kept for stage in stages] == [stages[0].kept] * len(stages)
    for found, atom in zip(kept, segment.outputs, strict=True):
        np.testing.assert_array_equal(found, plain(atom))
    assert sum(heavy(stage.segment) for stage in stages) == heavy(segment)  # nothing expensive is computed twice
    everything = [n for stage in stages for n in stage.messages]
    assert sorted(everything) == list(plan.sent_at(0))
    assert plan.sent_by_stage(0) == tuple(stage.messages for stage in stages)


def names_of(message):
    return [c.name for c in message]


def test_gradients_are_grouped_in_the_order_of_the_backward_pass():
    _, plan = in_stages(3)
    first, *_, last = (plan.messages[stage.messages[-1]] for stage in plan.stages[0])
    assert any("'out'" in name for name in names_of(first))
    assert not any("'out'" in name for name in names_of(last))
    assert any("['in']" in name for name in names_of(last))
    assert "'square'" in str(names_of(last))  # needs all gradients
    assert any(c.scope < Scope.MICROBATCH for c in last)  # the measurement
    assert len(in_stages(1)[1].stages) == 0


@pytest.mark.parametrize(
    ("driver", "level", "sent"),
    [
        (training, 0, True),
        (lambda s, b: (s, {"seconds": comm.all_reduce(read(SECONDS), op="max")}), 0, False),
        (
            lambda s, b: (s, {"mean": comm.all_reduce(comm.local_mean(b["y"].mean()) + read(SECONDS), op="max")}),
            0,
            False,
        ),
        (lambda s, b: (s, {"steps": ad.step()}), 0, False),
    ],
)
def test_only_a_message_of_the_batch_that_is_always_sent_is_cut(driver, level, sent):
    plan = planner(driver, STATE).begin(4)
    found = always_sent(plan, level)
    assert (found is not None) == sent
    assert bool(choose(plan, 3)) == sent
    if found is not None:
        assert found.travels
        assert found.gate is None


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (lambda a, b: a @ b, [(5, 3), (3, 7)], 2 * 5 * 3 * 7),
        (lambda a: a + 1, [(5, 3)], 15),
        (lambda a: a.sum(), [(5, 3)], 15),
        (lambda a: jnp.broadcast_to(a, (4, 3)), [(3,)], 12),
        (lambda a, b: jax.lax.conv(a, b, (1, 1), "VALID"), [(2, 3, 8, 8), (4, 3, 5, 5)], 2 * (2 * 4 * 16) * (3 * 25)),
        (lambda a: jax.lax.scan(lambda c, x: (c + x, None), a[0], a)[0], [(6, 5)], 6 * 5),
    ],
)
def test_work_is_counted_in_operations(function, shapes, expected):
    jaxpr = jax.make_jaxpr(function)(*map(jnp.zeros, shapes)).jaxpr
    assert max(map(work, jaxpr.eqns)) == expected
