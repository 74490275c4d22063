"""What each value is computed from, and in which outputs a difference counts, from the graph alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive import operators
from adaptive.check.dependencies import DATA, Dependencies, named_steps
from adaptive.check.trials import outputs_of
from tests.adaptive.drivers import FEATURES, mean_loss, planned, planner

W = jnp.zeros(FEATURES)


def depending(driver, state=W, **options):
    plan = planned(driver, state, **options)
    return plan, Dependencies(plan, outputs_of(plan))


@pytest.mark.parametrize(
    ("metric", "messages"),
    [
        (lambda a, b: a - b, {0, 1}),
        (lambda a, b: jnp.where(a > 1, b, 0.0), {0, 1}),
        (lambda a, b: jnp.where(jnp.isfinite(a), b, 0.0), {1}),
        (lambda a, b: jnp.where(a != a, b, 0.0), {1}),
        (lambda a, b: jnp.where(a == jnp.inf, b, 0.0), {1}),
        (lambda a, b: jnp.where(a < -jnp.inf, b, 0.0), {1}),
        (lambda a, b: jnp.where(a == 1e30, b, 0.0), {0, 1}),
        (lambda a, b: jnp.where(a + jnp.inf > 0, b, 0.0), {0, 1}),  # an infinity that nothing is compared with
        (lambda a, b: jnp.where(jnp.any(jnp.stack([a, b]) < np.float32([jnp.inf, 1])), 1.0, 0.0), {0, 1}),
    ],
)
def test_a_check_for_nans_hides_all_differences_of_finite_values(metric, messages):
    def driver(state, batch):
        return state, {"metric": metric(comm.all_reduce(batch["y"].mean()), comm.all_reduce(batch["x"].mean()))}

    plan, depend = depending(driver)
    of = depend.of(plan.graph.metrics[0])
    assert {i for i, result in enumerate(depend.contributions) if result in of} == messages


def number():
    """Return this worker's number, which is known before the step and differs between workers."""
    return ad.worker_index().astype(float)


@pytest.mark.parametrize(
    ("value", "local_state", "of_data"),
    [
        (lambda s, b: b["y"].sum(), (), True),
        (lambda s, b: s * number(), (), False),
        (lambda s, b: s * number(), (0,), True),
        (lambda s, b: mon.ema(number()), (), True),
        (lambda s, b: ad.batch_size(), (), False),
    ],
)
def test_values_of_data_are_those_of_examples_and_of_state_of_one_worker(value, local_state, of_data):
    def driver(state, batch):
        return state, {"rows": comm.all_gather(value(state, batch))}

    plan, depend = depending(driver, local_state=local_state)
    assert (DATA in depend.of(plan.messages[-1][-1].value)) == of_data


def test_a_number_of_the_batchs_shape_is_data():
    def driver(state, batch):
        return state, {"n": comm.all_reduce(jnp.ones(len(batch["y"])).sum() ** 2, op="sum")}

    plan = planner(driver, W).begin(8)
    assert DATA in Dependencies(plan, outputs_of(plan)).of(plan.messages[0][0].value)


def test_a_mean_depends_on_what_weighs_it():
    def driver(state, batch):
        first = comm.all_reduce(batch["y"].mean())
        weighed = comm.all_reduce(number(), weight=first * ad.batch_size().astype(float))
        of_rows = comm.all_reduce(number(), weight=batch["y"].sum())
        return state, {"a weighed": weighed, "b of rows": of_rows, "c": comm.all_reduce(number()), "d": first}

    plan, depend = depending(driver)
    tags = [depend.of(a) for a in plan.graph.metrics]
    assert [len(of & depend.contributions.keys()) for of in tags] == [2, 1, 1, 1]
    assert [DATA in of for of in tags] == [True, True, False, True]
    assert "examples" not in tags[3]  # which only weighs the mean


@pytest.mark.parametrize(
    ("rate", "steps"),
    [
        (lambda: jnp.where(ad.step_number() > 500, 0.1, 0.2), [500]),
        (lambda: jnp.where(jax.lax.rem(ad.step_number(), 7) == 5, 3.0 * ad.global_batch().astype(float), 0.2), [5, 7]),
        (lambda: jnp.where((ad.step_number() + 1) % 300 == 7, 0.1, 0.2), [7, 300]),
        (lambda: jnp.minimum(ad.step_number(), 2).astype(float), [2]),
        (lambda: jnp.where(ad.step_number() < 2**31 - 1, 0.1, 0.2), []),
        (lambda: 17.0 * (ad.step_number().astype(float) * jnp.array([11.0, 13.0])).sum(), []),
        (lambda: 9.0 * ad.global_batch().astype(float), []),
    ],
)
def test_numbers_that_the_step_is_compared_with_are_found(rate, steps):
    plan = planned(lambda s, b: (s - rate() * comm.all_reduce(jax.grad(mean_loss)(s, b)), {}), W)
    assert [n for n in named_steps(plan.graph) if n < 1000] == steps


# --- which outputs must not depend on which reductions ----------------------------------------------------------------


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

    plan, depend = depending(driver, {"w": W, "n": 0, "r": 0.0})
    by_output = {
        o.name: {depend.contributions[p].how.name for p in depend.places if depend.counts(p, o)}
        for o in outputs_of(plan)
    }
    assert by_output["metric ['rows']"] == by_output["metric ['sizes']"] == set()
    assert by_output["metric ['largest']"] == by_output["state['n']"] == {"all_gather"}
    assert by_output["metric ['w']"] == by_output["state['w']"] == by_output["state['r']"] == {"all_reduce"}
    assert by_output["metric ['by hand']"] == by_output["metric ['mixed']"] == {"all_reduce"}


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

    plan, depend = depending(driver, jnp.zeros(()))
    outputs = outputs_of(plan)
    (place,) = depend.places
    names = [o.name for o in outputs if depend.counts(place, o)]
    assert names == ["operator state 'total/1'", "operator state 'total/2'", "metric ['mean']"]
    as_state = [o.name for o in outputs if depend.is_state(o)]
    assert as_state == ["state", "operator state 'total/2'", "operator state 'total/3'"]
    assert {tag for tag in depend.of(plan.graph.new_state[0]) if isinstance(tag, int)} == {4}
