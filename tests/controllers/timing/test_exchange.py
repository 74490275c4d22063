"""How the seconds of an exchange go with the number of workers."""

from __future__ import annotations

import math

import pytest

from controllers.timing.exchange import Exchange


def seen(*spells, exchange=None):
    """An exchange that was seen for spells: (workers, seconds, steps)."""
    exchange = exchange or Exchange.init()
    for workers, seconds, steps in spells:
        for _ in range(steps):
            exchange = exchange.see(workers, seconds)
    return exchange


def test_nothing_is_known_at_first_and_of_one_number_no_slope():
    assert not Exchange.init().known
    assert not seen((2, 0.1, 2)).known  # steps of the change
    exchange = seen((2, 0.1, 10))
    assert exchange.known
    assert (exchange.of(2), exchange.of(8)) == (pytest.approx(0.1), pytest.approx(0.1))


def test_a_line_is_learnt_from_two_numbers_and_kept():
    exchange = seen((2, 0.1, 30), (4, 0.2, 30), (4, 0.3, 300))
    assert exchange.of(4) == pytest.approx(0.3, rel=1e-3)
    assert seen((2, 0.1, 30), (4, 0.2, 300)).of(8) == pytest.approx(0.4)
    assert exchange.slope == pytest.approx(0.1, rel=0.1)


def test_an_exchange_never_takes_less_the_more_they_are_nor_less_than_nothing():
    assert seen((2, 0.3, 30), (4, 0.2, 30)).slope == 0
    assert seen((4, 0.2, 30), (2, 0.01, 30)).of(1) == 0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_seconds_that_are_not_known_count_for_nothing(wrong):
    assert seen((2, 0.1, 10), (2, wrong, 10)).of(2) == pytest.approx(0.1)
    assert not seen((2, wrong, 10)).known
