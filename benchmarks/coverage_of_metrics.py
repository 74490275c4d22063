"""Bounds on the noise scales of signs, of matrices, of samples and of Adam's moments enclose the true ones as they say.

    python benchmarks/coverage_of_metrics.py --write              # about 5 minutes, one process

Gradients of single examples are drawn with a known mean and known deviations. `coverage_of_bounds.py` does the same for
the Euclidean noise scale of groups and of single examples. Here it is estimated from the norms of a few examples, from
norm layers with a ratio that is measured now and then, in the metrics of sign descent and of Muon, and from Adam's
moments. The metrics of sign descent and Muon assume that the signal is distributed like the noise; the rows of a sparse
signal and of one of rank one show what they estimate where it is not.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _measure import report

from monitors import noise_estimate
from monitors._averages import Averages, add_sample, no_samples, ratio_bounds
from monitors._metrics import noise_factor, squared_dual_norm
from monitors._moments import AdamState, after_step, no_blocks, noise_of
from monitors._noise import shared_error
from monitors._norm_layers import after_measurement, ratio_error, ratio_weights

SIZES, DECAY, NOMINAL = (8, 24), 0.95, 0.95
BATCH = sum(SIZES)
STEPS, MOMENT_STEPS = (5, 20, 50, 200), (63, 156, 621, 2000)  # the latter are 2, 5, 20 and 64 samples
OWN = 3  # every third element is a norm layer's
B1, B2, EPS = 0.9, 0.999, 1e-8
Found = tuple[jax.Array, jax.Array, jax.Array]  # lower bound, upper bound, estimate


class Case(NamedTuple):
    """What is estimated, of which gradients."""

    name: str
    way: str
    mean: np.ndarray
    deviation: np.ndarray
    truth: float  # the noise scale, in examples
    heavy: bool = False  # each example's noise has a random factor with a kurtosis of 6


def scaled(way: str, mean: np.ndarray, deviation: np.ndarray, noise: float = 2.0) -> tuple[np.ndarray, float]:
    """Return the mean times a factor that makes the noise scale `noise` batches, and that noise scale."""
    if way == "sign":
        ratio = deviation.sum() / np.abs(mean).sum()
    elif way == "spectral":  # of independent elements of equal variance
        m, n = sorted(mean.shape)
        ratio = m * n**0.5 * deviation[0, 0] / np.linalg.norm(mean, "nuc")
    else:
        ratio = np.linalg.norm(deviation) / np.linalg.norm(mean)
    return mean * ratio / np.sqrt(noise * BATCH), noise * BATCH


def cases() -> list[Case]:
    """Return what is measured."""
    rng = np.random.default_rng(0)
    spread = np.arange(1, 49) ** -0.375
    normal = rng.permutation([NormalDist().inv_cdf((i + 0.5) / 48) for i in range(48)])
    sparse = np.where(np.arange(48) % 8 == 0, normal, 0)
    full, ones = rng.standard_normal((12, 16)), np.ones((12, 16))
    alone = np.outer(rng.standard_normal(12), rng.standard_normal(16))

    def case(name: str, way: str, mean: np.ndarray, deviation: np.ndarray, heavy: bool = False) -> Case:
        return Case(name, way, *_swapped(scaled(way, mean, deviation), deviation), heavy)

    return [
        case("norms of 2 + 2 examples", "sample", normal * spread, spread),
        case("norms of 2 + 2 examples, heavy tails", "sample", normal * spread, spread, True),
        case("norm layers", "norm layers", normal * spread, spread),
        case("norm layers, heavy tails", "norm layers", normal * spread, spread, True),
        case("sign", "sign", normal * spread, spread),
        case("sign, all signal in an eighth of the elements", "sign", sparse * spread, spread),
        case("spectral", "spectral", full, ones),
        case("spectral, signal of rank one", "spectral", alone, ones),
    ]


def _swapped(found: tuple[np.ndarray, float], deviation: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    return found[0], deviation, found[1]


def _sample(way: str, grads: jax.Array, measured: jax.Array, due: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return trace and signal of one step, shape=(2,), and the measurements of the ratio, shape=(8, 2)."""
    total, sizes = grads.mean(0), jnp.asarray(SIZES, jnp.float32)
    axes = tuple(range(1, grads.ndim))
    if way in ("sign", "spectral"):
        starts = np.cumsum((0, *SIZES))
        groups = [grads[a:b].mean(0) for a, b in itertools.pairwise(starts)]
        norms = jnp.stack([squared_dual_norm(way, [g]) for g in groups])
        trace, signal = noise_estimate(sizes, norms, squared_dual_norm(way, [total], averaged=True))
        return jnp.stack([trace / noise_factor(way, [total]), signal]), measured
    squares = jnp.sum(grads**2, axes)
    if way == "sample":  # the first two of each worker stand for all of its examples
        squares = jnp.repeat(jnp.stack([squares[:2].mean(), squares[8:10].mean()]), np.array(SIZES))
    else:
        own = jnp.sum(grads[:, ::OWN] ** 2, 1)
        weights, base = ratio_weights(measured, [0])
        rest = jnp.where(due, squares - own, weights @ measured[:, 1] / (weights @ base) * own)
        measured = jnp.where(due, after_measurement(measured, jnp.stack([own.sum(), rest.sum()])), measured)
        squares = own + rest
    return jnp.stack(noise_estimate(jnp.ones(BATCH), squares, jnp.sum(total**2))), measured


@partial(jax.jit, static_argnames=("way", "heavy"))
def of_groups(key: jax.Array, mean: jax.Array, deviation: jax.Array, way: str, heavy: bool) -> Found:
    """Return what one stream gives after each number of steps; shape=(len(STEPS),)."""
    exact = np.isin(np.arange(max(STEPS)), (0, 1, 3, 7, 15, 31, 63, 127))

    def step(carry: Any, given: Any) -> Any:
        (averages, measured), (index, due) = carry, given
        normal, factor = jax.random.split(jax.random.fold_in(key, index))
        noise = jax.random.normal(normal, (BATCH, *mean.shape)) * deviation
        if heavy:
            factors = jnp.sqrt(jnp.where(jax.random.bernoulli(factor, 0.2, (BATCH,)), 3.0, 0.5))
            noise = noise * factors.reshape(-1, *[1] * mean.ndim)
        sample, measured = _sample(way, mean + noise, measured, due)
        averages, shared = add_sample(averages, sample, DECAY), None
        if way == "norm layers":
            shared = shared_error(averages, ratio_error(measured, [0], [0, 1]), jnp.float32(BATCH))
        return (averages, measured), (*ratio_bounds(averages, NOMINAL, shared), averages.mean[0] / averages.mean[1])

    start: Averages = jax.tree.map(jnp.asarray, no_samples(jnp.float32))
    _, found = jax.lax.scan(step, (start, jnp.zeros((8, 2))), (jnp.arange(max(STEPS)), jnp.asarray(exact)))
    return tuple(x[np.array(STEPS) - 1] for x in found)  # type: ignore[return-value]


@jax.jit
def of_moments(key: jax.Array, mean: jax.Array, deviation: jax.Array, turn: jax.Array) -> Found:
    """Return what one stream of Adam's moments gives; shape=(3 metrics, len(MOMENT_STEPS)).

    Args:
      turn: the angle by which the mean turns in each step, towards another one of its length.
    """
    other = jnp.roll(mean, 5)

    def step(carry: Any, index: jax.Array) -> Any:
        state, mu, nu = carry
        inverse = jnp.float32(1 / BATCH)
        state = after_step(state, AdamState(index, [mu], [nu]), inverse, b1=B1, b2=B2, eps=EPS, decay=0.9)
        now = mean * jnp.cos(turn * index) + other * jnp.sin(turn * index)
        noise = jax.random.normal(jax.random.fold_in(key, index), mean.shape) * deviation
        gradient = now + noise / BATCH**0.5
        noise_scales = noise_of(state, NOMINAL)
        found = [jnp.stack([getattr(n, name) for n in noise_scales]) for name in ("lower", "upper", "scale")]
        return (state, B1 * mu + (1 - B1) * gradient, B2 * nu + (1 - B2) * gradient**2), tuple(found)

    start = (jnp.asarray(no_blocks(np.float32)), jnp.zeros_like(mean), jnp.zeros_like(mean))
    _, found = jax.lax.scan(step, start, jnp.arange(max(MOMENT_STEPS)))
    return tuple(x[np.array(MOMENT_STEPS) - 1].T for x in found)  # type: ignore[return-value]


def held(found: Found, truth: float, names: list[str]) -> dict[str, object]:
    """Return how often bounds hold, by column, and what is estimated in the end."""
    lower, upper, scale = map(np.asarray, found)
    shares = ((lower <= truth) & (truth <= upper)).mean(0)
    cells: dict[str, object] = {name: f"{share:.1%}" for name, share in zip(names, shares, strict=True)}
    cells["upper over lower, at the end"] = f"{np.median(upper[:, -1] / lower[:, -1]):.2g}"
    return cells | {"median estimate over truth": f"{np.median(scale[:, -1]) / truth:.2f}"}


def batched(one: Callable[[jax.Array], Found], streams: int) -> Found:
    """Return what streams give, 500 at a time; each of shape=(streams, …)."""
    keys = jax.random.split(jax.random.key(7), streams).reshape(-1, 500)
    parts = [jax.tree.map(np.asarray, jax.vmap(one)(key)) for key in keys]
    return tuple(np.concatenate(x) for x in zip(*parts, strict=True))  # type: ignore[return-value]


def of_case(case: Case, streams: int) -> dict[str, object]:
    """Return one row of the first table."""
    mean, deviation = (jnp.asarray(x, jnp.float32) for x in (case.mean, case.deviation))
    found = batched(lambda key: of_groups(key, mean, deviation, case.way, case.heavy), streams)
    return {"": case.name} | held(found, case.truth, [f"{steps} steps" for steps in STEPS])


def of_adam(turn: float, streams: int, *, sparse: bool = False) -> list[dict[str, object]]:
    """Return the rows of the second table for one angle: a row for each metric.

    Args:
      sparse: whether all signal is in an eighth of the elements; then for the sign only.
    """
    rng = np.random.default_rng(0)
    deviation = np.arange(1, 49) ** -0.375
    normal = rng.permutation([NormalDist().inv_cdf((i + 0.5) / 48) for i in range(48)])
    signal = np.where(np.arange(48) % 8 == 0, normal, 0) if sparse else normal
    mean, _ = scaled("", signal * deviation, deviation)
    given = (jnp.asarray(x, jnp.float32) for x in (mean, deviation, turn))
    arrays = tuple(given)
    found = batched(lambda key: of_moments(key, *arrays), streams)
    p = np.sqrt(mean**2 + deviation**2 / BATCH)
    truths = {
        "Euclidean": np.sum(deviation**2) / np.sum(mean**2),
        "Adam": np.sum((deviation / p) ** 2) / np.sum((mean / p) ** 2),
        "sign": (deviation.sum() / np.abs(mean).sum()) ** 2,
    }
    steady = (
        f"turns by {turn:g} in each step" if turn else "constant, in an eighth of the elements" * sparse or "constant"
    )
    names = [f"{steps} steps" for steps in MOMENT_STEPS]
    return [
        {"gradient": steady, "metric": name} | held(tuple(x[:, i] for x in found), truth, names)  # type: ignore[arg-type]
        for i, (name, truth) in enumerate(truths.items())
        if name in (["sign"] if sparse else ["Euclidean"] if turn else truths)  # others' truths turn with the gradient
    ]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=2000, help="a multiple of 500")
    parser.add_argument("--only", choices=["groups", "moments"], help="one of the two tables")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    note = f"{args.streams:,} streams of {BATCH} examples a step, noise of two batches, nominal coverage 95 %. "
    if args.only != "moments":
        rows = [of_case(case, args.streams) for case in cases()]
        groups = (
            f"Two workers with 8 and 24 examples; 48 elements, or 12 x 16; a decay of {DECAY}. Norm layers: a third "
        )
        groups += "of the elements; the ratio is measured in steps 0, 1, 3, 7, 15, … ."
        report("Bounds in other metrics", rows, "coverage_of_metrics.md" if args.write else None, [note + groups])
    if args.only != "groups":
        rows = [row for turn in (0.0, 0.003, 0.01) for row in of_adam(turn, args.streams)]
        rows[3:3] = of_adam(0.0, args.streams, sparse=True)
        adam = f"Adam with b1 = {B1} and b2 = {B2}; a sample in every 31 steps, with a decay of 0.9; 48 elements."
        report("Bounds from Adam's moments", rows, "coverage_of_moments.md" if args.write else None, [note + adam])


if __name__ == "__main__":
    main()
