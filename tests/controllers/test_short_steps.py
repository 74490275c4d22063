"""`balance` on simulated steps of a few milliseconds: what it does where a split pays, and where it does not."""

from __future__ import annotations

import numpy as np
import pytest

import controllers as ctrl
from controllers.simulate import simulate


def over_equal(times, steps, seed, local=64, from_step=0):
    """Seconds with `balance` over those with equal batches, of a simulated run; the same chance in both."""
    sim = simulate(ctrl.balance(), times(seed), [local, local], steps, every=10, jitter=0.03, seed=seed)
    equal = simulate(
        ctrl.published.static_proportional([1, 1]), times(seed), [local, local], steps, every=10, jitter=0.03, seed=seed
    )
    return sim.seconds.max(axis=1)[from_step:].sum() / equal.seconds.max(axis=1)[from_step:].sum(), sim


def stalls(per_example, slice_, chance):
    """Worker 1 is stalled for a time slice in some steps: with `chance(seconds)` of those that it computes for."""

    def of(seed):
        rng = np.random.default_rng(seed)

        def times(step, sizes):
            seconds = sizes * per_example
            return seconds + np.array([0.0, slice_ * (rng.random() < chance(seconds[1]))])

        return times

    return of


def calls(per_example, slower, call):
    """Worker 1 is slower, and every call beyond a batch's first costs more than that."""

    def of(seed):
        return lambda step, sizes: sizes * per_example * [1, slower] + call * (np.bitwise_count(sizes) - 1.0)

    return of


@pytest.mark.parametrize(
    "times",
    [
        stalls(2e-5, 4e-3, lambda seconds: 0.5),  # whatever the batch is: there is nothing to be gained
        stalls(2e-5, 4e-3, lambda seconds: 250 * seconds),  # as many as it computes for
        stalls(1e-4, 4e-3, lambda seconds: 125 * seconds),
        calls(2e-5, 1.5, 1e-3),
    ],
    ids=["stalls", "a neighbor", "longer steps", "calls"],
)
def test_short_steps_are_never_longer_than_with_equal_batches(times):
    ratio, _ = over_equal(times, 3000, 0, from_step=1000)
    assert ratio < 1.02


def test_a_changing_load_is_followed_in_short_steps():
    def times(step, sizes):
        return sizes * np.array([2e-5, 6e-5 if 600 < step <= 2000 else 2e-5])

    sim = simulate(ctrl.balance(), times, [64, 64], 3500, every=10, jitter=0.03, seed=1)
    step = sim.seconds.max(axis=1)
    assert step[1500:2000].mean() < 0.55 * 64 * 6e-5
    assert step[3000:].mean() < 1.1 * 64 * 2e-5
