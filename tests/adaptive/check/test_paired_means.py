"""`check` names monitors whose mean is not the mean of the gradient beside it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive.check.paired_means import wrong_means
from adaptive.operators.operator_state import operator_state
from adaptive.operators.sources import Reading
from tests.adaptive.drivers import mean_loss, planned

from .test_invariance import DATA, W, check


def unequal(state, batch):
    """A driver that gives a monitor the gradient at other parameters than those of the average."""
    average = comm.all_reduce(jax.grad(mean_loss)(state, batch))
    return state - 0.1 * average, {"variance": mon.gradient_variance(jax.grad(mean_loss)(1 - state, batch), average)}


def test_a_mean_that_is_not_that_of_the_gradient_beside_it_is_named():
    found = check(unequal, W, batch=jax.tree.map(lambda a: a[:4], DATA))
    assert found.verdict == "no"
    assert not found.differences
    (name, difference), *others = found.wrong_means.items()
    assert not others
    assert name.startswith("gradient_variance (test_paired_means.py:")
    own, average = (np.asarray(jax.grad(mean_loss)(w, jax.tree.map(lambda a: a[:2], DATA))) for w in (1 - W, W))
    largest = max(np.linalg.norm(own), np.linalg.norm(average))
    assert difference == pytest.approx(np.linalg.norm(own - average) / largest, rel=1e-3)
    assert name in str(found)
    assert "split-invariant: 3 random splits" in str(found)


@pytest.mark.parametrize("workers", [1, 2])
def test_means_that_are_computed_in_another_way_are_not_accused(workers):
    """In half precision, of a scaled loss, and through the host, where nothing is known."""

    def driver(state, batch):
        grads = jax.grad(lambda w: 64 * mean_loss(w, batch))(state) / 64
        narrow = comm.all_reduce(grads.astype(jnp.bfloat16)).astype(jnp.float32)
        by_sums = comm.all_reduce((batch["y"].size * grads, jnp.float32(batch["y"].size)), op="sum")
        metrics = [mon.gradient_variance(grads, mean) for mean in (narrow, by_sums[0] / by_sums[1])]
        return state - 0.1 * comm.all_reduce(grads), dict(enumerate(metrics))

    assert check(driver, W, workers=workers).wrong_means == {}


def host(x):
    """Return an array by way of the host."""
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@pytest.mark.parametrize(
    ("mean_of", "difference"),
    [
        (lambda g, b: comm.all_reduce(1.01 * g), None),  # as by rounding
        (lambda g, b: comm.all_reduce(2 * g), 1 / 2),
        (lambda g, b: comm.all_reduce(g / 2), 1 / 2),
        (lambda g, b: comm.all_reduce(2 * g + ad.step_number().astype(float) - 3), 1 / 2),
        (lambda g, b: comm.all_reduce(2 * g) * operator_state("factor", np.ones(()), lambda f: (f, f)), 1 / 2),
        (lambda g, b: comm.all_reduce(g * jnp.inf), None),
        (lambda g, b: comm.all_reduce(2 * host(g)), None),
        (lambda g, b: comm.all_reduce(2 * g + 0 * host(b["y"].sum())), None),
        (lambda g, b: comm.all_reduce(2 * g, op="max"), None),
        (lambda g, b: comm.all_gather(2 * g)[0], None),
    ],
)
def test_a_difference_is_relative_to_the_larger_norm_and_known_without_the_host_and_other_workers(mean_of, difference):
    def driver(state, batch):
        grads = jax.grad(mean_loss)(state, batch)
        return state - comm.all_reduce(grads), {"variance": mon.gradient_variance(grads, mean_of(grads, batch))}

    found = wrong_means(planned(driver, W), [W], jax.tree.leaves(DATA), Reading(3, 7, 1, 16, 6, 4, 1, 5, 0.1, 0.2))
    assert list(found.values()) == ([] if difference is None else [pytest.approx(difference)])
