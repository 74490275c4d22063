"""What each value is computed from, and in which outputs a difference counts, from the graph alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive.check.dependencies import DATA, Dependencies, named_steps
from tests.adaptive.drivers import FEATURES, mean_loss, planned

W = jnp.zeros(FEATURES)


def depending(driver, **options):
    plan = planned(driver, W, **options)
    return plan, Dependencies(plan)


@pytest.mark.parametrize(
    ("metric", "messages"),
    [
        (lambda a, b: jnp.where(a > 1, b, 0.0), {0, 1}),
        (lambda a, b: jnp.where(jnp.isfinite(a), b, 0.0), {1}),
        (lambda a, b: jnp.where(a != a, b, 0.0), {1}),
        (lambda a, b: jnp.where(a != b, b, 0.0), {0, 1}),
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
        (lambda: jnp.where(ad.step_number() < 2**31 - 1, 0.1, 0.2), []),
        (lambda: 17.0 * (ad.step_number().astype(float) * jnp.array([11.0, 13.0])).sum(), []),
        (lambda: 9.0 * ad.global_batch().astype(float), []),
    ],
)
def test_numbers_that_the_step_is_compared_with_are_found(rate, steps):
    plan = planned(lambda s, b: (s - rate() * comm.all_reduce(jax.grad(mean_loss)(s, b)), {}), W)
    assert [n for n in named_steps(plan.graph) if n < 1000] == steps
