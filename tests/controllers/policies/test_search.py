"""Searches for a split that found none are repeated less often."""

from __future__ import annotations

import numpy as np

import controllers as ctrl
from controllers.policies import balance as _balance
from controllers.policies.search import MORE, MOST_WAIT, Search
from tests.controllers.observations import observe

EQUAL, OTHER = np.array([64, 64]), np.array([60, 68])


def searches(gains, sizes=EQUAL):
    """At which of these decisions a search takes place, all of which are in vain."""
    search, found = Search.init(2), []
    for number, gain in enumerate(gains):
        if search.skips(sizes, gain):
            search = search.skipped()
        else:
            found.append(number)
            search = search.in_vain(sizes, gain)
    return found


def test_more_decisions_pass_after_each_search_in_vain():
    found = searches([0.05] * 100)
    assert found[:4] == [0, 2, 6, 14]
    assert np.diff(found[4:]).tolist() == [MOST_WAIT + 1] * (len(found) - 5)


def test_a_larger_gain_is_searched_for_at_once():
    assert searches([0.05, 0.05, 0.05, 0.05, 0.05 * MORE * 1.01]) == [0, 2, 4]


def test_only_a_gain_that_is_about_the_same_lengthens_the_wait():
    search = Search.init(2).in_vain(EQUAL, 0.5)
    assert search.in_vain(EQUAL, 0.5 * MORE).patience == 3
    assert search.in_vain(EQUAL, 0.6 * MORE).patience == 1
    assert search.in_vain(EQUAL, 0.1).patience == 3


def test_other_sizes_are_searched_for_at_once():
    search = Search.init(2).in_vain(EQUAL, 0.05)
    assert search.skips(EQUAL, 0.05)
    assert not search.skips(OTHER, 0.05)
    assert search.in_vain(OTHER, 0.05).patience == 1


def test_a_split_that_cannot_pay_is_not_searched_for_in_each_decision(monkeypatch):
    count = []
    split = _balance._split
    monkeypatch.setattr(_balance, "_split", lambda *args: count.append(1) or split(*args))
    policy, rng = ctrl.balance(stretch_seconds=0), np.random.default_rng(0)
    state = policy.init(2)
    for step in range(1, 101):
        seconds = np.array([0.100, 0.106]) * (1 + 1e-3 * rng.standard_normal(2))
        observation = observe(seconds, step=step, batch_sizes=(64, 64))
        observation = observation._replace(limits=observation.limits._replace(call_overhead=40.0))
        decision, state = policy.update(observation, state)
        assert decision is None
    assert 4 <= len(count) <= 15
