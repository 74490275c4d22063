"""How the seconds of a step go with the number of workers and with what they compute."""

from __future__ import annotations

import math

import numpy as np
import pytest

from controllers.timing.exchange import GAMMAS, MOST_OVERLAP, POINTS, Exchange, overlapped


def seen(*spells, exchange=None):
    """An exchange that was seen for spells: (workers, batch, compute, seconds, steps)."""
    exchange = exchange or Exchange.init()
    for workers, batch, compute, seconds, steps in spells:
        for _ in range(steps):
            exchange = exchange.see(workers, batch, compute, seconds)
    return exchange


def after(workers, exchange_seconds, steps, compute=0.1):
    """A spell without overlap."""
    return workers, 64, compute, compute + exchange_seconds, steps


def test_nothing_is_known_at_first_and_of_one_point_neither_slope_nor_overlap():
    assert not Exchange.init().known
    assert not seen(after(2, 0.1, 2)).known  # steps of the change
    exchange = seen(after(2, 0.1, 10))
    assert exchange.known
    assert exchange.single
    fit = exchange.fit()
    assert (fit.gamma, fit.slope) == (1.0, 0.0)
    assert (fit(2, 0.1), fit(8, 0.3)) == (pytest.approx(0.2), pytest.approx(0.4))


def test_a_line_is_learned_from_two_sizes():
    exchange = seen(after(2, 0.1, 30), after(4, 0.2, 30), after(4, 0.3, 300))
    assert not exchange.single
    assert exchange.fit()(4, 0.1) == pytest.approx(0.4, rel=1e-3)  # the present level, not that of the past
    assert seen(after(2, 0.1, 30), after(4, 0.2, 300)).fit()(8, 0.1) == pytest.approx(0.5, rel=1e-3)


def test_an_exchange_never_takes_less_the_more_they_are_nor_less_than_nothing():
    assert seen(after(2, 0.3, 30), after(4, 0.2, 30)).fit().slope == 0
    assert seen(after(4, 0.2, 30), after(2, 0.01, 30)).fit()(1, 0.1) == pytest.approx(0.1)


@pytest.mark.parametrize("gamma", [1.0, 2.0, 6.0])
def test_the_overlap_is_found_from_batches_with_other_compute_times(gamma):
    """From 2 % of noise, at batches of which some hide the exchange of 0.2 s and others do not."""
    draw, exchange = np.random.default_rng(0), Exchange.init()
    for batch in (400, 200, 100, 50):
        for _ in range(25):
            compute = 1e-3 * batch * (1 + 0.02 * draw.standard_normal())
            exchange = exchange.see(4, batch, compute, overlapped(compute, 0.2, gamma))
    fit = exchange.fit()
    for compute in (0.02, 0.1, 0.3, 0.8):
        assert fit(4, compute) == pytest.approx(overlapped(compute, 0.2, gamma), rel=0.03)


def test_the_model_passes_through_the_current_point_for_any_overlap():
    exchange = seen((4, 64, 0.1, 0.15, 30))
    for gamma in GAMMAS:
        assert exchange.fit(np.array([gamma]))(4, 0.1) == pytest.approx(0.15)
    assert exchange.fit(MOST_OVERLAP)(4, 0.2) < exchange.fit()(4, 0.2)


def test_a_repeated_point_replaces_the_earlier_one_and_few_are_kept():
    exchange = seen(*((4, 64 + k % 2, 0.1, 0.2, 5) for k in range(9)))
    assert (exchange.past[:, 4] > 0).sum() == 2
    exchange = seen(*((4, 64 + k, 0.1, 0.2, 5) for k in range(3 * POINTS)))
    assert (exchange.past[:, 4] > 0).sum() == POINTS


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_seconds_that_are_not_known_count_for_nothing(wrong):
    assert seen(after(2, 0.1, 10), after(2, wrong, 10)).fit()(2, 0.1) == pytest.approx(0.2)
    assert seen(after(2, 0.1, 10), (2, 64, wrong, 0.2, 10)).fit()(2, 0.1) == pytest.approx(0.2)
    assert not seen(after(2, wrong, 10)).known


def test_overlapped_seconds_lie_between_the_longer_and_the_sum():
    assert overlapped(0.3, 0.4, 1.0) == pytest.approx(0.7)
    assert overlapped(0.3, 0.4, 2.0) == pytest.approx(0.5)
    assert overlapped(0.3, 0.4, 1e3) == pytest.approx(0.4)
    assert overlapped(0.0, 0.0, 2.0) == 0.0
