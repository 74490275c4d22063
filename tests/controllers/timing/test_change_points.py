"""Change points: a worker that becomes slower than the others and than it was is found; nothing else is."""

from __future__ import annotations

import numpy as np
import pytest

from controllers.timing.change_points import BLOCK, ChangePoints

N, AT = 8, 150


def times(steps=300, n=N, seed=0, deviation=0.05):
    rng = np.random.default_rng(seed)
    return rng.uniform(0.5, 2.0, n) * np.exp(deviation * rng.standard_normal((steps, n)))


def watch(seconds, noise=0.05):
    """All onsets, with the step after which each is found; and the last state."""
    state, found = ChangePoints.init(seconds.shape[1]), []
    for step, row in enumerate(seconds, 1):
        state, onsets = state.observe(row, np.full(len(row), noise))
        found += [(step, onset) for onset in onsets]
    return found, state


@pytest.mark.parametrize("factor", [1.3, 2.0, 5.0])
@pytest.mark.parametrize("n", [2, 8])
def test_a_slow_worker_is_found_within_fifteen_steps(factor, n):
    for seed in range(5):
        seconds = times(AT + 20, n, seed)
        seconds[AT:, 1] *= factor
        ((step, onset),), state = watch(seconds)
        assert onset.worker_slot == 1
        assert AT < step <= AT + 15
        assert abs(step - onset.steps - AT) <= BLOCK
        np.testing.assert_allclose([onset.factor, state.factor[1]], factor, rtol=0.12)
        assert state.slow.tolist() == [slot == 1 for slot in range(n)]


def test_a_change_below_a_tenth_is_none():
    seconds = times(deviation=0.01)
    seconds[AT:, 1] *= 1.07
    assert watch(seconds, 0.01)[0] == []


def test_a_change_common_to_all_workers_is_no_change_point():
    seconds = times()
    seconds[AT:] *= 2.0
    assert watch(seconds)[0] == []


def test_a_worker_that_stays_as_it_was_while_the_others_become_faster_is_none():
    seconds = times()
    seconds[AT:, 1:] /= 2.0
    assert watch(seconds)[0] == []


def test_pauses_of_single_steps_are_left_out():
    seconds = times(2000)
    seconds[:: BLOCK * 4, 1] *= 50.0
    seconds[1 :: BLOCK * 7, 2] *= 5.0
    assert watch(seconds)[0] == []


def test_gradual_drift_is_no_change_point():
    seconds = times(1500)
    seconds[:, 1] *= np.exp(np.linspace(0.0, 0.7, 1500))
    assert watch(seconds)[0] == []


def test_a_worker_that_recovers_is_no_longer_slow_and_is_found_again():
    seconds = times(500)
    seconds[AT : AT + 60, 1] *= 2.0
    seconds[400:, 1] *= 2.0
    found, state = watch(seconds[: AT + 100])
    assert len(found) == 1
    assert not state.slow.any()
    found, state = watch(seconds)
    assert [onset.worker_slot for _, onset in found] == [1, 1]
    assert state.slow[1]


def test_unknown_times_are_skipped():
    seconds = times()
    seconds[AT:, 1] *= 2.0
    seconds[np.random.default_rng(1).random(seconds.shape) < 0.2] = np.nan
    seconds[:, 5] = np.nan
    found, _ = watch(seconds)
    assert [onset.worker_slot for _, onset in found] == [1]


def test_noise_is_no_change_point():
    """The noisier the steps, the more a worker must be slower; the noise may be known to a fifth."""
    for deviation in (0.02, 0.2):
        found, _ = watch(times(5_000, deviation=deviation), noise=0.8 * deviation)
        assert found == []
