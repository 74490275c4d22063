"""Robust reductions of vectors of any magnitude, against their definitions in extended precision."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import collectives as comm
from collectives._robust import Median

WEIGHTS = np.array([3.0, 2.0, 5.0, 4.0, 3.0])
BY_DTYPE = {"float32": 2e-4, "float64": 1e-6}  # near a worker's vector Weiszfeld's iteration is slow
HUGE = [1.0, 1e6, 1e20, 1e37]
BEYOND_SINGLE = [1e160, 1e290]


@pytest.fixture(params=list(BY_DTYPE))
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param


@cache  # one jitted function per operation: a new one in each test would be traced and compiled again
def in_one_place(op):
    return jax.jit(lambda rows: op.in_one_place(rows, 1))


def reduced(op, vectors, weights, dtype, how=in_one_place):
    rows = np.concatenate([weights[:, None], vectors], 1).astype(dtype)
    with np.errstate(all="ignore"):
        return np.asarray(how(op)([jnp.asarray(row) for row in rows]), np.longdouble)[1:]


def vectors(bad, by, size, dtype, seed=0):
    """Five normal vectors, the first `bad` of which are multiplied by `by`."""
    found = np.random.default_rng(seed).normal(size=(5, size)).astype(dtype)
    found[:bad] *= np.asarray(by, dtype)
    return found


def pull(point, rows, weights):
    """How far the point is from the geometric median: the sum of weighted directions, per total weight.

    At the median it is 0, or at a vector itself no more than that vector's own weight.
    """
    away = rows.astype(np.longdouble) - point[None]
    far = np.sqrt((away**2).sum(1))
    scale = np.median(far)
    there = far < 1e-3 * scale
    total = (weights[~there, None] * away[~there] / far[~there, None]).sum(0)
    return max(float(np.sqrt((total**2).sum()) - weights[there].sum()), 0.0) / weights.sum()


@pytest.mark.parametrize("bad", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "by"),
    [("float32", by) for by in HUGE] + [("float64", by) for by in HUGE + BEYOND_SINGLE],
    indirect=["dtype"],
)
def test_the_geometric_median_does_not_depend_on_how_far_bad_workers_are(dtype, by, bad):
    for seed in range(3):
        rows = vectors(bad, by, 50, dtype, seed)
        point = reduced(comm.geometric_median(), rows, WEIGHTS, dtype)
        assert pull(point, rows, WEIGHTS) < 20 * BY_DTYPE[dtype]


@pytest.mark.parametrize("bad", [1, 2])
@pytest.mark.parametrize("what", [np.inf, -np.inf, np.nan])
def test_vectors_that_are_not_finite_have_no_vote(dtype, what, bad):
    rows = vectors(bad, 1, 50, dtype)
    rows[:bad, 3] = what
    point = reduced(comm.geometric_median(), rows, WEIGHTS, dtype)
    assert pull(point, rows[bad:], WEIGHTS[bad:]) < BY_DTYPE[dtype]


@pytest.mark.parametrize("by", [2.0**-70, 2.0**120])
@pytest.mark.parametrize("op", [comm.geometric_median(), Median(), comm.trimmed_mean(1)], ids=lambda op: op.name)
def test_results_scale_with_the_vectors(op, by, dtype):
    rows = vectors(1, 1e4, 50, dtype)
    rows[0] = np.clip(rows[0], -50, 50)
    once = reduced(op, rows, WEIGHTS, dtype)
    scaled = reduced(op, rows * np.asarray(by, dtype), WEIGHTS, dtype)
    np.testing.assert_allclose(scaled, once * by, rtol=16 * np.finfo(dtype).eps)  # XLA rounds as it fuses


def test_equal_vectors_are_their_own_geometric_median_beside_a_huge_one(dtype):
    rows = np.tile(vectors(0, 1, 20, dtype)[:1], (5, 1))
    rows[4] *= np.asarray(1e15, dtype)
    np.testing.assert_array_equal(reduced(comm.geometric_median(), rows, WEIGHTS, dtype), rows[0])


@pytest.mark.parametrize("there", [(0, 1, 2, 3), (1, 2, 4), (0, 3), (2,)], ids=str)
def test_a_trimmed_mean_of_few_workers_leaves_one_or_two_of_them(there, dtype):
    """If `trim` at both ends would leave no worker, as many are left out as leave the middle."""
    rows, weights = vectors(0, 1, 20, dtype), np.zeros(5)
    weights[list(there)] = WEIGHTS[list(there)]
    found = reduced(comm.trimmed_mean(2), rows, weights, dtype)
    order = np.argsort(rows[list(there)], axis=0)
    trim = (len(there) - 1) // 2
    middle = order[trim : len(there) - trim]
    values = np.take_along_axis(rows[list(there)], middle, 0)
    votes = WEIGHTS[list(there)][middle]
    np.testing.assert_allclose(found, (values * votes).sum(0) / votes.sum(0), rtol=BY_DTYPE[dtype])


def test_nans_of_more_workers_than_are_left_out_stay(dtype):
    """Of five workers two are left out at either end; of three that have examples, one."""
    rows = vectors(0, 1, 4, dtype)
    for bad, there, lost in ((2, 5, False), (3, 5, True), (1, 3, False), (2, 3, True)):
        spoilt = rows.copy()
        spoilt[:bad, 1] = np.nan
        found = reduced(comm.trimmed_mean(2), spoilt, WEIGHTS * (np.arange(5) < there), dtype)
        assert np.isnan(found).tolist() == [False, lost, False, False]


def test_a_trimmed_mean_of_huge_values_is_finite(dtype):
    """A value times its weight can overflow, where the mean does not."""
    largest = float(np.finfo(dtype).max)
    rows = np.full((5, 3), largest / 2)
    found = reduced(comm.trimmed_mean(1), rows, 64 * WEIGHTS, dtype)
    np.testing.assert_allclose(np.asarray(found / np.longdouble(largest), float), 0.5, rtol=1e-6)
