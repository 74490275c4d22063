"""Noise scales from Adam's moments, on a quadratic whose gradients have a known mean and covariance."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from monitors._moments import AdamState, after_step, block_length, no_blocks, noise_of

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


def simulated(steps, batch=16, b2=0.99, decay=0.97, drift=0.0, mean=MEAN, seed=0):
    """Return the noise scales after some steps of an Adam whose gradients are normal, and turn by `drift` each step."""
    rng = np.random.default_rng(seed)
    other = np.roll(mean, 7)
    shape = (mean.size // 4, 4)
    state = jnp.asarray(no_blocks(np.float32))
    mu, nu = np.zeros(mean.size), np.zeros(mean.size)
    options = {"b1": 0.9, "b2": b2, "eps": EPS, "decay": decay}
    advance = jax.jit(lambda state, adam: after_step(state, adam, jnp.float32(1 / batch), **options))
    for step in range(steps):
        tree = [{"w": x.astype(np.float32).reshape(shape)} for x in (mu, nu)]
        state = advance(state, AdamState(np.int32(step), *tree))
        true = mean * np.cos(drift * step) + other * np.sin(drift * step)
        gradient = true + DEVIATION[: mean.size] * rng.standard_normal(mean.size) / batch**0.5
        mu, nu = 0.9 * mu + 0.1 * gradient, b2 * nu + (1 - b2) * gradient**2
    return noise_of(state, 0.95)


def test_the_moments_of_a_stationary_gradient_give_its_noise_scales():
    noise = simulated(2000)
    np.testing.assert_allclose([noise.euclidean.scale, noise.adam.scale], truth(16)[:2], rtol=0.05)
    assert noise.sign.scale == pytest.approx(truth(16)[2], rel=0.1)  # of a signal whose distribution is not the noise's
    for metric, true in zip(noise[:2], truth(16), strict=False):
        assert 0.8 * true < metric.lower < metric.scale < metric.upper < 1.3 * true
    assert noise.euclidean.trace == pytest.approx(np.sum(DEVIATION**2), rel=0.05)
    assert noise.euclidean.signal == pytest.approx(np.sum(MEAN**2), rel=0.05)


@pytest.mark.parametrize("kind", ["normal", "equal magnitudes", "an eighth of the elements"])
@pytest.mark.parametrize("noise", [0.5, 4.0])
def test_bounds_for_the_sign_hold_however_the_signal_is_distributed(kind, noise):
    """Those of a model in which statistical errors are smaller than those of the estimate itself."""
    shape = {
        "normal": RNG.standard_normal(SIZE),
        "equal magnitudes": np.sign(RNG.standard_normal(SIZE)),
        "an eighth of the elements": np.where(np.arange(SIZE) % 8 == 0, RNG.standard_normal(SIZE), 0),
    }[kind]
    mean = shape * np.linalg.norm(DEVIATION) / np.linalg.norm(shape) / (16 * noise) ** 0.5
    true = (DEVIATION.sum() / np.abs(mean).sum()) ** 2
    sign = simulated(900, mean=mean.astype(np.float32)).sign
    assert sign.lower < true < sign.upper
    assert 0.03 * true < sign.lower < sign.scale < sign.upper < 30 * true


def test_a_gradient_that_turns_within_the_memory_of_the_second_moment_is_not_noise():
    """It is the first moment that lags: by 9 steps, in which the gradient turns by 0.1."""
    turned = simulated(1500, b2=0.999, drift=0.01)
    assert turned.euclidean.scale == pytest.approx(truth(16)[0], rel=0.1)
    for metric, true in zip(turned[1:], truth(16)[1:], strict=True):
        assert metric.scale == pytest.approx(true, rel=0.35)


def test_there_is_a_sample_at_the_end_of_each_block():
    length = block_length(0.9)
    assert 0.9**length < 0.04 < 0.9 ** (length - 1)
    assert block_length(0.0) == 2
    first, second, third = (simulated(steps) for steps in (length, length + 1, 2 * length))
    assert np.isnan(first).all()
    assert np.isfinite(second.euclidean.scale)
    np.testing.assert_array_equal(second, third)
    assert simulated(2 * length + 1).euclidean.trace != third.euclidean.trace


def test_without_signal_the_lower_bound_is_above_the_batch():
    noise = simulated(1500, mean=np.zeros(SIZE))
    for metric in noise:
        assert metric.upper == np.inf
        assert metric.lower > 16


def test_a_program_measures_it_while_its_batch_changes():
    """Of an optimizer that does not move, so that the gradient's mean is constant; batches of 8, then of 24."""
    rng = np.random.default_rng(1)
    data = (MEAN + DEVIATION * rng.standard_normal((6000, SIZE))).astype(np.float32)

    def driver(state, batch):
        w, opt_state = state
        grads = batch.mean(0) + 0 * w
        average = comm.all_reduce(grads)
        metrics = {"moments": mon.moment_noise(opt_state, b2=0.99, decay=0.99)}
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
    moments = [report.metrics["moments"] for report in reports]
    assert np.isnan(moments[20]).all()
    assert reports[-1].global_batch == 24
    late = moments[-1]
    np.testing.assert_allclose([late.euclidean.scale, late.sign.scale], np.array(truth(24))[[0, 2]], rtol=0.15)
    assert truth(8)[1] * 0.8 < late.adam.scale < truth(24)[1] * 1.2
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
    with pytest.raises(ad.CollectiveError, match=r"moment_noise \(test_moments.py:\d+\): decay=1"):
        mon.moment_noise(state, decay=1)
    with pytest.raises(ad.CollectiveError, match=r"adam_scale \(test_moments.py:\d+\): b2=1"):
        mon.adam_scale(state, b2=1)


def test_a_divisor_belongs_to_the_gradients_of_groups():
    grads, other = {"w": jnp.ones(3)}, {"w": 2 * jnp.ones(3)}
    with pytest.raises(ad.CollectiveError, match="divide_by must have the structure and shapes"):
        mon.noise_scale(grads, other, divide_by={"w": jnp.ones(2)})
    with pytest.raises(ad.CollectiveError, match="exclude each other"):
        mon.noise_scale(grads, other, divide_by=grads, per_example={"w": jnp.ones(4)})
