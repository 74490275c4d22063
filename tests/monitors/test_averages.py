"""Moving averages that know how well they are known: moments against their definition, bounds against simulation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from monitors._averages import add_sample, no_samples, ratio_bounds, student_t


def after(samples, decay):
    """Averages after a stream of shape (steps, 2) or, of many streams at once, (steps, 2, streams)."""

    def one(stream):
        return jax.lax.scan(lambda a, x: (add_sample(a, x, decay), None), no_samples(stream.dtype), stream)[0]

    samples = jnp.asarray(samples)
    return jax.jit(one if samples.ndim == 2 else jax.vmap(one, in_axes=2))(samples)


# --- moments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.95])
def test_moments_are_those_of_the_definition(decay):
    x = np.random.default_rng(0).standard_normal((40, 2)) @ [[2.0, 1.0], [0.0, 0.5]] + [100.0, -3.0]
    got = after(x.astype(np.float32), decay)
    w = decay ** np.arange(39.0, -1, -1)
    mean = w @ x / w.sum()
    scatter = np.einsum("t,ti,tj->ij", w, x - mean, x - mean)
    spread = np.sqrt(np.diag(scatter))
    assert got.weight == pytest.approx(w.sum(), rel=1e-5)
    assert got.weight_squares == pytest.approx((w**2).sum(), rel=1e-5)
    assert got.mean == pytest.approx(mean, rel=1e-5)
    assert got.spread == pytest.approx(spread, rel=1e-4, abs=1e-4)
    if decay:
        assert got.correlation == pytest.approx(scatter[0, 1] / spread.prod(), abs=1e-4)


@pytest.mark.parametrize("bad", [(np.nan, 1.0), (1.0, np.inf), (np.nan, np.nan)])
def test_a_sample_that_is_not_finite_changes_nothing(bad):
    x = np.random.default_rng(0).standard_normal((5, 2)).astype(np.float32)
    with_bad = np.insert(x, [0, 2, 5], np.float32(bad), axis=0)
    for a, b in zip(after(x, 0.9), after(with_bad, 0.9), strict=True):
        np.testing.assert_array_equal(a, b)


# --- quantiles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dof", "quantile", "tolerance"),
    [(1, 12.706, 0.4), (3, 3.182, 0.015), (10, 2.228, 1e-3), (1e6, 1.95996, 1e-4), (1e-4, 1e4, np.inf)],
)
def test_student_s_quantile(dof, quantile, tolerance):
    t = float(student_t(0.95, jnp.float32(dof)))
    assert quantile * (1 - 1e-4) < t < quantile * (1 + tolerance)


# --- bounds -----------------------------------------------------------------------------------------------------------


def stream(noise_over_batch, steps, *, groups=4, dimensions=50, streams=4000):
    """Traces and signals as the estimator makes them of Gaussian gradients (Cochran's theorem); batches of 64."""
    rng, batch = np.random.default_rng(7), 64
    truth = noise_over_batch * batch
    trace = rng.chisquare((groups - 1) * dimensions, (steps, streams)) / (groups - 1)
    mean_norm = rng.noncentral_chisquare(dimensions, batch * dimensions / truth, (steps, streams)) / batch
    return np.stack([trace, mean_norm - trace / batch], axis=1).astype(np.float32), truth


@pytest.mark.parametrize(
    ("noise_over_batch", "decay", "steps", "options"),
    [
        (0.2, 0.95, 120, {"groups": 2, "dimensions": 200}),
        (2, 0.95, 5, {}),
        (10, 0.95, 120, {}),  # a third of the upper bounds is infinite
    ],
)
def test_bounds_hold_as_often_as_they_say(noise_over_batch, decay, steps, options):
    samples, truth = stream(noise_over_batch, steps, **options)
    lower, upper = jax.vmap(lambda a: ratio_bounds(a, 0.95))(after(samples, decay))
    covered = np.mean((lower <= truth) & (truth <= upper))
    assert 0.93 <= covered <= 0.97
    assert np.isfinite(lower).all()
    assert (lower >= 0).all()


def test_bounds_are_where_fieller_s_condition_is_even():
    averages = after(stream(2, 60, streams=1)[0][..., 0], 0.9)
    lower, upper = ratio_bounds(averages, 0.95)
    n = averages.weight**2 / averages.weight_squares
    sd = averages.spread / jnp.sqrt(averages.weight * (n - 1))
    t = student_t(0.95, n - 1)
    for ratio in (lower, upper):
        distance = (averages.mean[0] - ratio * averages.mean[1]) ** 2
        cross = 2 * ratio * averages.correlation * sd.prod()
        assert float(distance) == pytest.approx(float(t**2 * (sd[0] ** 2 - cross + (ratio * sd[1]) ** 2)), rel=1e-2)
    assert 0 < lower < averages.mean[0] / averages.mean[1] < upper < np.inf


def test_where_no_signal_is_seen_there_is_a_lower_bound_and_no_upper_one():
    rng = np.random.default_rng(0)
    hidden = np.stack([50 + rng.standard_normal(100), rng.standard_normal(100)], axis=1).astype(np.float32)
    hidden[:, 1] -= hidden[:, 1].mean() + 0.05
    lower, upper = map(float, ratio_bounds(after(hidden, 0.95), 0.95))
    assert 50 < lower < 500
    assert upper == np.inf
    impossible = hidden - np.float32([0, 5])  # further below zero than can be: says no more than zero
    assert ratio_bounds(after(impossible, 0.95), 0.95)[0] == pytest.approx(lower, rel=0.1)


def test_one_sample_bounds_nothing():
    for steps, decay in (([[3.0, 2.0], [np.nan, 2.0]], 0.9), ([[3.0, 2.0], [4.0, 2.0]], 0.0)):
        assert ratio_bounds(after(np.float32(steps), decay), 0.95) == (0, np.inf)


@pytest.mark.parametrize(("pair", "expected"), [((6, 2), (3, 3)), ((0, 0), (0, np.inf)), ((0, 2), (0, 0))])
def test_without_any_spread_the_bounds_meet(pair, expected):
    bounds = ratio_bounds(after(np.tile(np.float32(pair), (9, 1)), 0.9), 0.95)
    assert [float(b) for b in bounds] == pytest.approx(expected)
