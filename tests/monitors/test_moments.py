"""Noise scales from Adam's moments, on a quadratic whose gradients have a known mean and covariance."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from monitors._moments import _shrinkage, noise_of_moments

SIZE = 400
RNG = np.random.default_rng(4)
MEAN = RNG.standard_normal(SIZE).astype(np.float32) * 0.3
DEVIATION = RNG.uniform(0.5, 2, SIZE).astype(np.float32)
EPS = 1e-8


def truth(batch):
    """The noise scales of gradients N(MEAN, DEVIATION^2 / batch); in Adam's metric with p^2 = E g^2."""
    p = MEAN**2 + DEVIATION**2 / batch
    return (
        np.sum(DEVIATION**2) / np.sum(MEAN**2),
        np.sum(DEVIATION**2 / p) / np.sum(MEAN**2 / p),
        (DEVIATION.sum() / np.abs(MEAN).sum()) ** 2,
    )


def test_the_moments_of_a_stationary_gradient_give_its_noise_scales():
    batch, h1, h2 = 16, 0.05 / 16, 1 / 16
    rng, found = np.random.default_rng(0), []
    for _ in range(40):
        m = MEAN + np.sqrt(h1) * DEVIATION * rng.standard_normal(SIZE)
        s = MEAN**2 + DEVIATION**2 * h2 * (1 + 0.03 * rng.standard_normal(SIZE))
        arrays = [[jnp.asarray(x[:150], jnp.float32), jnp.asarray(x[150:], jnp.float32).reshape(50, 5)] for x in (m, s)]
        found.append(noise_of_moments(*arrays, jnp.float32(h1), jnp.float32(h2), EPS))
    euclidean, adam, sign = np.mean(found, 0)
    np.testing.assert_allclose([euclidean, adam], truth(batch)[:2], rtol=0.03)
    assert sign == pytest.approx(truth(batch)[2], rel=0.1)  # an approximation, and a root of noisy variances


def test_noise_in_the_mean_is_taken_out_of_its_magnitude():
    """Of normal means, whose noise only makes them wider: (c w)^2 + t^2 = w^2."""
    means = np.abs(np.random.default_rng(2).standard_normal(20000)).astype(np.float32)
    c = float(_shrinkage(jnp.asarray(means), jnp.full(20000, 0.6, jnp.float32)))
    assert c == pytest.approx(0.8, abs=0.01)


def test_without_noise_the_noise_scale_is_zero_and_without_signal_infinite():
    m, h1, h2 = [jnp.asarray(MEAN)], jnp.float32(0.01), jnp.float32(0.1)
    np.testing.assert_allclose(noise_of_moments(m, [m[0] ** 2], h1, h2, EPS), 0, atol=1e-6)
    none = noise_of_moments([jnp.zeros(3)], [jnp.ones(3)], h1, h2, EPS)
    assert np.isinf(none).all()


def test_a_program_measures_it_while_its_batch_changes():
    """Of an optimizer that does not move, so that the gradient's mean is constant; batches of 8, then of 24."""
    rng = np.random.default_rng(1)
    data = (MEAN + DEVIATION * rng.standard_normal((6000, SIZE))).astype(np.float32)

    def driver(state, batch):
        w, opt_state = state
        grads = batch.mean(0) + 0 * w
        average = comm.all_reduce(grads)
        metrics = {"moments": mon.moment_noise(opt_state, b2=0.99)}
        scale = mon.adam_scale(opt_state, b2=0.99)
        metrics["adam"] = mon.noise_scale(grads, average, divide_by=scale, decay=0.99)
        ctrl.hook(ctrl.schedule({0: 8, 100: 24}))
        mean = optax.tree.update_moment(average, opt_state.mu, 0.9, 1)
        square = optax.tree.update_moment(average, opt_state.nu, 0.99, 2)
        return (w, optax.ScaleByAdamState(opt_state.count + 1, mean, square)), metrics

    w = jnp.zeros(SIZE)
    with ad.Program(
        driver,
        (w, optax.scale_by_adam().init(w)),
        data,
        global_batch=8,
        world=comm.SoloWorld(),
        microbatch=4,
        deterministic=True,
    ) as program:
        reports = [program.step() for _ in range(300)]
    found = [np.array(report.metrics["moments"]) for report in reports]
    assert np.isnan(found[1]).all()
    assert reports[-1].global_batch == 24
    late = np.mean(found[200:], 0)
    np.testing.assert_allclose(late[[0, 2]], np.array(truth(24))[[0, 2]], rtol=0.1)
    assert truth(8)[1] * 0.8 < late[1] < truth(24)[1] * 1.2
    adam = reports[-1].metrics["adam"]
    assert adam.lower < truth(24)[1] * 1.1
    assert adam.upper > truth(24)[1] * 0.9


@pytest.mark.parametrize("operator", [mon.moment_noise, mon.adam_scale])
def test_states_without_moments_are_refused(operator):
    with pytest.raises(ad.CollectiveError, match=rf"^{operator.__name__} \(test_moments.py:\d+\): .*contains 0"):
        operator(optax.sgd(0.1, momentum=0.9).init(jnp.ones(3)))
    two = optax.chain(optax.scale_by_adam(), optax.scale_by_adam()).init(jnp.ones(3))
    with pytest.raises(ad.CollectiveError, match="contains 2"):
        operator(two)


def test_options_out_of_range_are_refused():
    state = optax.adam(0.1).init(jnp.ones(3))
    with pytest.raises(ad.CollectiveError, match=r"moment_noise \(test_moments.py:\d+\): b1=0.9 and b2=0.5"):
        mon.moment_noise(state, b2=0.5)
    with pytest.raises(ad.CollectiveError, match=r"adam_scale \(test_moments.py:\d+\): b2=1"):
        mon.adam_scale(state, b2=1)


def test_a_divisor_belongs_to_the_gradients_of_groups():
    grads, other = {"w": jnp.ones(3)}, {"w": 2 * jnp.ones(3)}
    with pytest.raises(ad.CollectiveError, match="divide_by must have the structure and shapes"):
        mon.noise_scale(grads, other, divide_by={"w": jnp.ones(2)})
    with pytest.raises(ad.CollectiveError, match="exclude each other"):
        mon.noise_scale(grads, other, divide_by=grads, per_example={"w": jnp.ones(4)})
