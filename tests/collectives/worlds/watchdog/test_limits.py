"""The time after which a rank that does nothing counts as stuck, by the times of operations."""

from __future__ import annotations

import numpy as np
import pytest

from collectives.worlds.watchdog.limits import LONGEST, HangLimits


def shortest(seconds, hang_timeout=None):
    """The limit after operations that have taken so many seconds each."""
    return HangLimits(hang_timeout, lambda: np.cumsum([0.0, *seconds])).shortest()


def test_ten_times_the_slowest_of_a_hundred_operations():
    assert shortest([0.5] * 200) == pytest.approx(5.0)
    assert shortest([0.5] * 100 + [30.0]) == pytest.approx(5.0)  # one that took long, such as the first
    assert shortest([0.5] * 95 + [1.0] * 5) == pytest.approx(10.0)
    assert shortest([0.5] * 197 + [1.0] * 3) == pytest.approx(10.0)


def test_not_less_than_two_seconds_and_not_more_than_for_others():
    assert shortest([0.001] * 200) == 2.0
    assert shortest([8.0] * 200) == LONGEST


def test_the_first_operations_set_no_limit():
    assert shortest([]) == LONGEST
    assert shortest([0.001] * 49) == LONGEST
    assert shortest([0.001] * 50) == 2.0


def test_a_given_time_is_taken_in_all_cases():
    assert shortest([0.001] * 200, hang_timeout=7.0) == 7.0
    assert "sets the time (7 s" in HangLimits(7.0, list).describe(7.0)
    assert "2.0 s for a rank that is stopped or idle in a step, and 60 s" in HangLimits(None, list).describe(2.0)


def test_no_step_of_a_noisy_run_is_past_the_limit():
    draw = np.random.default_rng(0)
    steps = draw.lognormal(np.log(0.5), 0.5, 10_000)
    ends = np.concatenate([[0.0], np.cumsum(steps)])
    over = [k for k in range(100, len(steps)) if k % 20 == 0 and steps[k : k + 20].max() > _limit(ends[: k + 1])]
    assert over == []


def _limit(ends):
    return HangLimits(None, lambda: ends[-512:]).shortest()
