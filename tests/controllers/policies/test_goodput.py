"""`goodput_batch`: the global batch settles where goodput is near its best."""

from __future__ import annotations

import math

import numpy as np
import pytest

import controllers as ctrl
from tests.controllers.observations import Noise, observe

TIMES = ctrl.timing.BatchTime(np.array([1 / 1500, 1 / 500]), np.array([0.02, 0.02]))  # V = 2000/s, alpha = .02 s


def settled(noise, overhead, start=64, steps=400, **settings):
    """The global batch after a while, with the split balanced and times of 2 % jitter."""
    rng = np.random.default_rng(0)
    policy = ctrl.goodput_batch(**settings)
    state = policy.init(2)
    total = start
    sizes = previous = ctrl.timing.allocate(total, TIMES, 1, 10**6)
    seconds, iteration = np.full(2, np.nan), math.nan
    for step in range(1, steps + 1):
        observation = observe(
            noise,
            seconds,
            iteration,
            step=step,
            batch_sizes=tuple(sizes.tolist()),
            previous=tuple(previous.tolist()),
            upper=10**6,
            due=step % 20 == 0,
        )
        decision, state = policy.update(observation, state)
        seconds = TIMES(sizes) * (1 + 0.02 * rng.standard_normal(2))
        iteration = seconds.max() + overhead
        previous = sizes
        if decision:
            total = decision.global_batch
            sizes = ctrl.timing.allocate(total, TIMES, 1, 10**6)
    return total


@pytest.mark.parametrize(("phi", "overhead", "start"), [(900, 0.03, 64), (900, 0.33, 3000), (100, 0.03, 3000)])
def test_the_batch_settles_where_goodput_is_within_the_accepted_gain_of_its_best(phi, overhead, start):
    best = math.sqrt(phi * 2000 * (0.02 + overhead))

    def goodput(batch):
        return batch / (0.02 + overhead + batch / 2000) * ctrl.timing.efficiency(phi, batch)

    total = settled(float(phi), overhead, start=start)
    assert goodput(best) / goodput(total) < 1.07
    assert abs(math.log(total / best)) <= abs(math.log(start / best))


def test_a_batch_is_made_smaller_step_by_step_until_compute_times_of_two_sizes_are_known():
    """After one size, fixed costs and costs of examples are one number; half the batch may take as long as all."""
    first, second = (settled(100.0, 0.03, start=3000, steps=steps) for steps in (20, 40))
    assert 0.7 * 3000 < first < 0.8 * 3000
    assert second < 0.67 * first


def test_goodput_judges_by_the_bounds():
    def soon(noise, **settings):
        return settled(noise, 0.33, steps=160, **settings)

    assert soon(Noise(900, 0, math.inf)) == soon(Noise(math.nan, math.nan, math.nan)) == 64
    assert soon(Noise(900, 500, math.inf)) > 128
    assert soon(900.0, max_batch=100) <= 100
    assert soon(100.0, factor=9.0) == soon(900.0) > soon(100.0)


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="growth"):
        ctrl.goodput_batch(growth=0.5)
    with pytest.raises(ValueError, match="factor"):
        ctrl.goodput_batch(factor=0.0)
