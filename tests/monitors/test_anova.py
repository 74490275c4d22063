"""One step's trace and signal: known answers, no bias, least variance."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest

import monitors as mon

DRAWS = 40_000


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def estimate(sizes, norms, mean_norm, **options):
    """`noise_estimate` on numpy arrays, one row per draw."""
    sizes = np.broadcast_to(np.asarray(sizes, float), norms.shape)
    return tuple(np.asarray(x) for x in mon.noise_estimate(sizes, norms, mean_norm, **options))


def norms_of(sizes, grads):
    """Squared norms of group gradients, and of their mean over examples; `grads` is (draws, groups, dimensions)."""
    mean = np.einsum("g,ngd->nd", sizes, grads) / np.sum(sizes)
    return np.einsum("ngd,ngd->ng", grads, grads), np.einsum("nd,nd->n", mean, mean)


def gaussian(sizes, signal, dimensions=50, seed=0):
    """Norms for Gaussian examples whose covariance is the identity and whose mean has this squared norm."""
    rng = np.random.default_rng(seed)
    grads = rng.standard_normal((DRAWS, len(sizes), dimensions)) / np.sqrt(sizes)[:, None]
    grads[..., 0] += np.sqrt(signal)
    return norms_of(sizes, grads)


def test_three_gradients_equal_a_calculation_by_hand():
    g, b = np.array([[1.0, 2.0], [3.0, -1.0], [0.0, 1.0]]), np.array([1, 2, 3])
    norms, mean_norm = norms_of(b, g[None])
    assert mean_norm[0] == pytest.approx(29 / 18, rel=1e-15)
    trace, signal = mon.noise_estimate(b, norms[0], mean_norm[0])
    assert float(trace) == pytest.approx(55 / 6, rel=1e-14)
    assert float(signal) == pytest.approx(1 / 12, rel=1e-13)
    assert float(trace / signal) == pytest.approx(110, rel=1e-13)


# --- against other estimators -----------------------------------------------------------------------------------------


def kungfu(sizes, norms, mean_norm):
    """From the first worker's own gradient: Mai et al. 2020."""
    b, total = sizes[0], np.sum(sizes)
    signal = (total * mean_norm - b * norms[:, 0]) / (total - b)
    return (norms[:, 0] - mean_norm) / (1 / b - 1 / total), signal


@pytest.mark.parametrize(
    ("sizes", "signal"),
    [((10, 20, 30, 40), 0), ((1, 1, 1, 97), 1)],
)
def test_variance_is_the_least_there_is(sizes, signal):
    sizes, d = np.array(sizes), 50
    norms, mean_norm = gaussian(sizes, signal, d)
    n, total = len(sizes), sizes.sum()
    trace, power = estimate(sizes, norms, mean_norm)

    var_trace = 2 * d / (n - 1)
    var_signal = 4 * signal / total + 2 * d * n / ((n - 1) * total**2)
    assert trace.var() == pytest.approx(var_trace, rel=0.05)
    assert power.var() == pytest.approx(var_signal, rel=0.05)
    assert trace.mean() == pytest.approx(d, abs=4 * np.sqrt(var_trace / DRAWS))
    assert power.mean() == pytest.approx(signal, abs=4 * np.sqrt(var_signal / DRAWS))
    assert np.cov(trace, power)[0, 1] == pytest.approx(
        -var_trace / total, abs=5 * np.sqrt(var_trace * var_signal / DRAWS)
    )

    their_trace, their_signal = kungfu(sizes, norms, mean_norm)
    assert their_trace.mean() == pytest.approx(d, abs=4 * their_trace.std() / np.sqrt(DRAWS))  # a fair comparison
    assert their_trace.var() > (n - 1) * trace.var()
    assert their_signal.var() > power.var()


# --- no bias ----------------------------------------------------------------------------------------------------------


def test_heavy_tails_and_uneven_sizes_bring_no_bias():
    sizes, d, mean = np.array([1, 3, 7, 21]), 4, np.array([0.3, 0.0, -0.2, 0.1])
    examples = np.random.default_rng(2).standard_t(5, (DRAWS, sizes.sum(), d)) + mean
    grads = np.add.reduceat(examples, np.cumsum(sizes) - sizes, axis=1) / sizes[:, None]
    trace, signal = estimate(sizes, *norms_of(sizes, grads))
    for estimates, truth in ((trace, d * 5 / 3), (signal, mean @ mean)):
        assert estimates.mean() == pytest.approx(truth, abs=4 * estimates.std() / np.sqrt(DRAWS))
    assert trace.std() / np.sqrt(DRAWS) < 0.03  # so that what is within four of these is close


# --- edges ------------------------------------------------------------------------------------------------------------


def test_one_group_gives_no_estimate_and_empty_groups_do_not_count():
    assert np.isnan(mon.noise_estimate([8], [3.0], 3.0)).all()
    assert np.isnan(mon.noise_estimate([8, 0], [3.0, np.nan], 3.0)).all()
    with_empty = mon.noise_estimate([1, 0, 2, 3], [5.0, np.nan, 10.0, 1.0], 29 / 18)
    assert with_empty == mon.noise_estimate([1, 2, 3], [5.0, 10.0, 1.0], 29 / 18)
