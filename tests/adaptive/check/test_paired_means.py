"""`check` names monitors whose mean is not the mean of the gradient beside it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import collectives as comm
import monitors as mon
from tests.adaptive.drivers import mean_loss

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
