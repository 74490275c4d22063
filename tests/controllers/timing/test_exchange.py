"""How the seconds of a step besides computing go with the number of workers."""

from __future__ import annotations

import math

import pytest

from controllers.timing.exchange import POINTS, Exchange


def seen(*spells, exchange=None):
    """An exchange that was seen for spells: (workers, batch, compute, seconds, steps)."""
    exchange = exchange or Exchange.init()
    for workers, batch, compute, seconds, steps in spells:
        for _ in range(steps):
            exchange = exchange.see(workers, batch, compute, seconds)
    return exchange


def after(workers, exchange_seconds, steps, compute=0.1):
    """A spell in which the exchange takes so many seconds."""
    return workers, 64, compute, compute + exchange_seconds, steps


def test_nothing_is_known_at_first_and_of_one_number_of_workers_no_slope():
    assert not Exchange.init().known
    assert not seen(after(2, 0.1, 2)).known  # steps of the change
    exchange = seen(after(2, 0.1, 10))
    assert exchange.known
    assert exchange.seconds(2) == pytest.approx(0.1)
    assert exchange.seconds(8) == pytest.approx(0.1)


def test_a_line_is_learned_from_two_sizes():
    exchange = seen(after(2, 0.1, 30), after(4, 0.2, 30), after(4, 0.3, 300))
    assert exchange.seconds(4) == pytest.approx(0.3, rel=1e-3)  # the present level, not that of the past
    assert seen(after(2, 0.1, 30), after(4, 0.2, 300)).seconds(8) == pytest.approx(0.4, rel=1e-3)


def test_an_exchange_never_takes_less_the_more_they_are_nor_less_than_nothing():
    assert seen(after(2, 0.3, 30), after(4, 0.2, 30)).seconds(8) == pytest.approx(0.2)
    assert seen(after(4, 0.2, 30), after(2, 0.01, 30)).seconds(1) == 0.0


def test_a_pause_counts_as_twice_the_mean():
    assert seen(after(2, 0.1, 10), after(2, 50.0, 1)).seconds(2) < 0.11


def test_few_numbers_of_workers_are_kept():
    exchange = seen(*(after(4 + k % 2, 0.1, 5) for k in range(9)))
    assert (exchange.past[:, 2] > 0).sum() == 2
    exchange = seen(*(after(1 + k, 0.1, 5) for k in range(3 * POINTS)))
    assert (exchange.past[:, 2] > 0).sum() == POINTS


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_seconds_that_are_not_known_count_for_nothing(wrong):
    assert seen(after(2, 0.1, 10), after(2, wrong, 10)).seconds(2) == pytest.approx(0.1)
    assert seen(after(2, 0.1, 10), (2, 64, wrong, 0.2, 10)).seconds(2) == pytest.approx(0.1)
    assert not seen(after(2, wrong, 10)).known
