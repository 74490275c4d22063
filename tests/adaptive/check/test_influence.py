"""What `check` knows of each value from the graph alone: its reductions, operator states and sources."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive import operators
from adaptive.check.influence import Influence, steps_named
from adaptive.check.relevance import Relevance
from adaptive.check.trials import outputs_of
from adaptive.operators.sources import STEP
from tests.adaptive.drivers import FEATURES, mean_loss, planned

COVERS = ("adaptive/check/relevance.py",)

W = jnp.zeros(FEATURES)


def facts_of(metric):
    """Return the facts of a metric that is computed from two means, the first of bit 1 and the second of bit 2."""

    def driver(state, batch):
        return state, {"metric": metric(comm.all_reduce(batch["y"].mean()), comm.all_reduce(batch["x"].mean()))}

    plan = planned(driver, W)
    return Influence(plan).of(plan.graph.metrics[0])


@pytest.mark.parametrize(
    ("metric", "through"),
    [
        (lambda a, b: 2 * a, 1),
        (lambda a, b: a - b, 3),
        (lambda a, b: jnp.where(a > 1, b, 0.0), 3),
        (lambda a, b: jnp.argmax(jnp.stack([a, b])), 3),
        (lambda a, b: jnp.where(jnp.isfinite(a), b, 0.0), 2),
        (lambda a, b: jnp.where(a != a, b, 0.0), 2),
        (lambda a, b: jnp.where(a == jnp.inf, b, 0.0), 2),
        (lambda a, b: jnp.where(a < -jnp.inf, b, 0.0), 2),
        (lambda a, b: jnp.where(a == 1e30, b, 0.0), 3),
        (lambda a, b: jnp.where(a + jnp.inf > 0, b, 0.0), 3),  # an infinity that nothing is compared with
        (lambda a, b: jnp.where(jnp.any(jnp.stack([a, b]) < np.float32([jnp.inf, 1])), 1.0, 0.0), 3),
    ],
)
def test_a_check_for_nans_hides_all_differences_of_finite_values(metric, through):
    assert facts_of(metric).through == through


def number():
    """Return this worker's number, which is known before the step and differs between workers."""
    return ad.worker_index().astype(float)


def sent(value, local_state=()):
    """Return the facts of a value that each worker sends."""

    def driver(state, batch):
        return state, {"rows": comm.all_gather(value(state, batch))}

    plan = planned(driver, W, local_state=local_state)
    return Influence(plan).carried(plan.messages[-1][-1])


@pytest.mark.parametrize(
    ("value", "local_state", "of_data"),
    [
        (lambda s, b: b["y"].sum(), (), True),
        (lambda s, b: s * b["y"].sum(), (), True),
        (lambda s, b: s * number(), (), False),
        (lambda s, b: s * number(), (0,), True),
        (lambda s, b: mon.ema(number()), (), True),
        (lambda s, b: number() * mon.ema(s.sum()), (), False),
    ],
)
def test_values_of_data_are_those_of_examples_and_of_state_of_one_worker(value, local_state, of_data):
    assert sent(value, local_state).of_data == of_data


def test_operator_states_are_distinguished():
    def driver(state, batch):
        mean = comm.all_reduce(batch["y"].mean())
        one, other = mon.ema(mean), mon.ema(2 * mean)
        return state, {"one": one, "other": other, "both": one + other, "none": mean}

    plan = planned(driver, W)
    influence = Influence(plan)
    found = {name: influence.of(a).op_states for name, a in zip(plan.graph.metric_names, plan.graph.metrics)}  # noqa: B905
    assert sorted(found.values()) == [0, 1, 2, 3]
    assert found["['both']"] == 3
    assert found["['none']"] == 0


def test_a_source_counts_unless_it_only_weighs_a_mean():
    assert sent(lambda s, b: ad.microbatch_size().astype(float) * b["y"].sum()).sources == {"examples"}
    assert sent(lambda s, b: ad.batch_size()).sources == frozenset()
    assert facts_of(lambda a, b: a + b).sources == frozenset()


def test_a_mean_depends_on_what_weighs_it():
    def driver(state, batch):
        first = comm.all_reduce(batch["y"].mean())
        weighed = comm.all_reduce(number(), weight=first * ad.batch_size().astype(float))
        of_rows = comm.all_reduce(number(), weight=batch["y"].sum())
        return state, {"a weighed": weighed, "b of rows": of_rows, "c": comm.all_reduce(number())}

    plan = planned(driver, W)
    weighed, of_rows, plain = map(Influence(plan).of, plan.graph.metrics)
    assert [weighed.through.bit_count(), of_rows.through.bit_count(), plain.through.bit_count()] == [2, 1, 1]
    assert [weighed.of_data, of_rows.of_data, plain.of_data] == [True, True, False]


@pytest.mark.parametrize(
    ("rate", "steps"),
    [
        (lambda: jnp.where(ad.step_number() > 500, 0.1, 0.2), [500]),
        (lambda: jnp.where(jax.lax.rem(ad.step_number(), 7) == 5, 3.0 * ad.global_batch().astype(float), 0.2), [5, 7]),
        (lambda: jnp.where(ad.step_number() + ad.global_batch() > 90, 0.1, 0.2), [90]),
        (lambda: jnp.where((ad.step_number() + 1) % 300 == 7, 0.1, 0.2), [7, 300]),
        (lambda: jnp.minimum(ad.step_number(), 2).astype(float), [2]),
        (lambda: jnp.where(ad.step_number() < 1, 0.1, 0.2), []),
        (lambda: jnp.where(ad.step_number() < 2**31 - 1, 0.1, 0.2), []),
        (lambda: 17.0 * (ad.step_number().astype(float) * jnp.array([11.0, 13.0])).sum(), []),
        (lambda: jnp.where(ad.step_number().astype(float) < jnp.inf, 0.1, 0.2), []),
        (lambda: 9.0 * ad.global_batch().astype(float), []),
    ],
)
def test_numbers_that_the_step_is_compared_with_are_found(rate, steps):
    plan = planned(lambda s, b: (s - rate() * comm.all_reduce(jax.grad(mean_loss)(s, b)), {}), W)
    found = steps_named(plan, STEP.name)
    assert [n for n in found if n < 1000] == steps


# --- which outputs must not depend on which reductions ----------------------------------------------------------------


def counted(driver, state=W):
    """Return the relevance of a driver's reductions, and the outputs in which each counts, by their lines' order."""
    plan = planned(driver, state)
    outputs = outputs_of(plan)
    relevance = Relevance(plan, Influence(plan), outputs)
    places = [(level, i) for level, message in enumerate(plan.messages) for i in range(len(message))]
    return relevance, outputs, [[o.name for o in outputs if relevance.counts(place, o)] for place in places]


def test_operators_of_the_split_count_in_the_state_alone():
    def driver(state, batch):
        grads = jax.grad(mean_loss)(state["w"], batch)
        average = comm.all_reduce(grads)
        noise = mon.noise_scale(grads, average)
        rows, sizes = comm.all_gather(batch["y"].sum()), comm.all_gather(ad.batch_size())
        by_hand = comm.all_reduce(ad.microbatch_size().astype(float) * batch["y"].mean(), op="sum")
        metrics = {"rows": rows, "sizes": sizes, "largest": rows.max(), "scale": noise.scale, "w": average}
        metrics |= {"by hand": by_hand, "mixed": noise.scale + comm.all_reduce(batch["y"].max(), op="max")}
        return {"w": state["w"] - average, "n": state["n"] + sizes.sum(), "r": state["r"] + noise.trace}, metrics

    relevance, outputs, _ = counted(driver, {"w": W, "n": 0, "r": 0.0})
    by_output = {
        o.name: {relevance.contribution(p).how.name for p in relevance.places if relevance.counts(p, o)}
        for o in outputs
    }
    assert by_output["metric ['rows']"] == by_output["metric ['sizes']"] == set()
    assert by_output["metric ['largest']"] == by_output["state['n']"] == {"all_gather"}
    assert by_output["metric ['w']"] == by_output["state['w']"] == by_output["state['r']"] == {"all_reduce"}
    assert by_output["metric ['by hand']"] == by_output["metric ['mixed']"] == {"all_reduce"}
    scale = next(o for o in outputs if o.name == "metric ['scale']")
    square = [p for p in relevance.places if relevance.facts(p).sources]
    assert square
    assert not any(relevance.counts(p, scale) for p in square)


def total_before(value):
    """Add up a value over the steps, and return the sum over the steps before."""
    return operators.operator_state("total", np.zeros(()), lambda old: (old + value, old))


def test_an_operator_state_counts_if_it_is_read_and_as_state_if_a_later_state_follows_it():
    def driver(state, batch):
        mean = comm.all_reduce(batch["y"].mean())
        total_before(2 * mean)  # is read by nothing
        mon.ema(7 * mean, 0.9)  # nor is this, two numbers of which each is computed from both
        shown = total_before(3 * mean)
        return state + total_before(total_before(5 * mean)), {"shown": shown, "mean": mean}

    relevance, outputs, (names,) = counted(driver, jnp.zeros(()))
    assert names == ["operator state 'total/1'", "operator state 'total/2'", "metric ['mean']"]
    as_state = [o.name for o in outputs if relevance.is_state(o)]
    assert as_state == ["state", "operator state 'total/2'", "operator state 'total/3'"]
