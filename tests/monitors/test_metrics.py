"""Noise scales in the metrics of sign descent and of Muon, where the truth is known."""

from __future__ import annotations

from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive.runtime.local_world import LocalWorld
from monitors._metrics import noise_factor, nuclear_norm, squared_dual_norm

from .lockstep import Lockstep, reading

SIZES = (8, 24)
READINGS = [reading(worker=i, examples=b, batch_size=b, global_batch=sum(SIZES)) for i, b in enumerate(SIZES)]


def quantiles(n):
    """Values that are distributed like a standard normal one."""
    return np.random.default_rng(0).permutation([NormalDist().inv_cdf((i + 0.5) / n) for i in range(n)])


def averages(metric, mean, deviation, steps=60, **options):
    """The noise after some steps of two workers, whose gradients are normal."""
    rng = np.random.default_rng(1)
    program = Lockstep(lambda g: mon.noise_scale(g, comm.all_reduce(g), metric=metric, decay=0.999, **options))
    for _ in range(steps):
        rows = [
            (
                jax.tree.map(
                    lambda m, d, b=b: np.float32(m + d * rng.standard_normal(m.shape) / b**0.5), mean, deviation
                ),
            )
            for b in SIZES
        ]
        noise = program.step(rows, READINGS)[0]
    return noise


def test_the_noise_scale_of_signs_is_a_ratio_of_sums_of_magnitudes():
    deviation = np.random.default_rng(2).uniform(0.2, 2, 3000)
    mean = 0.15 * deviation * quantiles(3000)
    split = [{"a": x[:1000], "b": x[1000:].reshape(40, 50)} for x in (mean, deviation)]
    noise = averages("sign", *split)
    assert noise.trace == pytest.approx(deviation.sum() ** 2, rel=0.03)
    assert noise.signal == pytest.approx(np.abs(mean).sum() ** 2, rel=0.03)
    truth = (deviation.sum() / np.abs(mean).sum()) ** 2
    assert noise.scale == pytest.approx(truth, rel=0.05)
    euclidean = np.sum(deviation**2) / np.sum(mean**2)
    assert abs(noise.scale / euclidean - 1) > 0.3  # another number
    assert 0 < noise.lower < truth < noise.upper


@pytest.mark.parametrize("shape", [(24, 32), (32, 24), (10, 200)])
def test_the_noise_scale_of_matrices_is_a_ratio_of_sums_of_singular_values(shape):
    mean = 0.2 * np.random.default_rng(3).standard_normal(shape)
    noise = averages("spectral", {"w": mean, "b": np.ones(5)}, {"w": np.ones(shape), "b": np.ones(5)}, steps=20)
    assert noise.trace == pytest.approx(min(shape) ** 2 * max(shape), rel=0.05)  # (tr E[N N']^(1/2))^2
    assert noise.signal == pytest.approx(np.linalg.norm(mean, "nuc") ** 2, rel=0.07)


def test_by_has_a_noise_scale_for_each_matrix():
    rng = np.random.default_rng(4)
    mean = {"first": rng.standard_normal((12, 20)) * 0.3, "last": rng.standard_normal((16, 16)), "bias": np.ones(3)}
    ones = jax.tree.map(np.ones_like, mean)
    layers = averages("spectral", mean, ones, steps=12, by=lambda path: path[0])
    assert list(layers) == ["first", "last"]
    for name, noise in layers.items():
        m, n = sorted(mean[name].shape)
        truth = m**2 * n / np.linalg.norm(mean[name], "nuc") ** 2
        assert noise.scale == pytest.approx(truth, rel=0.15)


def test_the_sum_of_singular_values():
    for shape in ((5, 9), (9, 5), (1, 4), (4, 4)):
        matrix = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
        expected = np.linalg.svd(matrix, compute_uv=False).sum()
        for unit in (1, 1e-30, 1e18):
            assert nuclear_norm(jnp.asarray(matrix * np.float32(unit))) == pytest.approx(expected * unit, rel=1e-4)
    assert nuclear_norm(jnp.zeros((3, 4))) == 0
    both = [jnp.asarray(matrix), 2 * jnp.asarray(matrix)]
    assert squared_dual_norm("spectral", both) == pytest.approx((3 * expected) ** 2, rel=1e-4)


def test_the_share_of_noise_in_the_norm_of_a_large_matrix():
    assert noise_factor("spectral", [np.zeros((64, 64))]) == pytest.approx((8 / (3 * np.pi)) ** 2, rel=1e-3)
    assert noise_factor("spectral", [np.zeros((1, 10000))]) == pytest.approx(1, abs=1e-3)
    singular = np.linalg.svd(np.random.default_rng(6).standard_normal((60, 120)) / 120**0.5, compute_uv=False)
    assert noise_factor("spectral", [np.zeros((120, 60))]) == pytest.approx(singular.mean() ** 2, rel=0.02)


def test_every_leaves_steps_out():
    """A program on two workers, of which every third step is a sample."""
    data = np.random.default_rng(7).normal(size=(400, 6)).astype(np.float32) + 1

    def driver(w, batch):
        grads = batch.mean(0) - w
        average = comm.all_reduce(grads)
        options = {"metric": "sign", "decay": 0.9}
        return w, (mon.noise_scale(grads, average, every=3, **options), mon.noise_scale(grads, average, **options))

    with ad.Program(driver, jnp.zeros(6), data, global_batch=12, world=LocalWorld(2), resizable=False) as program:
        found = [program.step().metrics for _ in range(7)]
    traces = np.array([[float(noise.trace) for noise in metrics] for metrics in found])
    assert traces[0, 0] == traces[0, 1]
    assert (np.diff(traces[:, 0]) != 0).tolist() == [False, False, True, False, False, True]
    assert (np.diff(traces[:, 1]) != 0).all()


def test_meaningless_metrics_are_refused():
    grads, other = {"w": jnp.ones((3, 2))}, {"w": 2 * jnp.ones((3, 2))}
    refused = [
        ({"metric": "adam"}, "metric='adam' must be one of 'euclidean', 'sign', 'spectral'"),
        ({"metric": "sign", "per_example": {"w": jnp.ones(4)}}, "norms of single examples are Euclidean"),
        ({"metric": "spectral", "divide_by": grads}, "exclude each other"),
        ({"every": 0}, "every=0 must be a positive integer"),
        ({"every": 2, "per_example": {"w": jnp.ones(4)}}, "full_every"),
        ({"metric": "spectral", "by": lambda path: None if path[0] == "w" else "x"}, "by="),
    ]
    for options, text in refused:
        with pytest.raises(ad.CollectiveError, match=rf"^noise_scale(?s:.)*{text}"):
            mon.noise_scale(grads, other, **options)
    with pytest.raises(ad.CollectiveError, match=r"^noise_scale \(test_metrics.py:\d+\): .*no leaf has two axes"):
        mon.noise_scale({"b": jnp.ones(3)}, {"b": 2 * jnp.ones(3)}, metric="spectral")
