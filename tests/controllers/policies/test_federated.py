"""`federated`: rounds of clients that differ in speed and in their links."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adaptive as ad
import controllers as ctrl
from adaptive.base.errors import DriverError
from controllers.simulate import simulate
from tests.controllers.observations import observe

TAU = 4
SPEED = np.array([1000.0, 500.0, 250.0])  # examples per second
LINK = np.array([0.05, 0.2, 0.0])


def rounds(link=LINK, speed=SPEED):
    return ctrl.timing.BatchTime(1 / speed, link)


def decide(policy, seconds, *further, batch_sizes=(280, 280, 280), quantum=TAU):
    observation = observe(np.asarray(seconds), *further, batch_sizes=batch_sizes, lower=TAU, quantum=quantum)
    return policy.update(observation, policy.init(len(seconds)))[0]


def compute(sizes, speed=SPEED):
    return np.asarray(sizes) / speed


def test_clients_finish_together():
    """T with sum_i (T - comm_i) v_i = X, by hand: (840 + 50 + 100) / 1750 = 0.5657 s."""
    decision = decide(ctrl.federated(), compute((280, 280, 280)), LINK, quantum=1)
    level = (840 + (LINK * SPEED).sum()) / SPEED.sum()
    np.testing.assert_allclose(decision.shares, (level - LINK) * SPEED, atol=1)
    assert decision.notes == ("a round is expected to take 0.566 s, down from 1.12 s",)


def test_links_shift_examples_to_the_well_connected():
    with_links = decide(ctrl.federated(), compute((280, 280, 280)), LINK).shares
    without = decide(ctrl.federated(), compute((280, 280, 280))).shares
    assert without == (480, 240, 120)
    assert with_links[1] < without[1]
    assert with_links[2] > without[2]


def test_a_delay_common_to_all_links_does_not_matter():
    one, two = (decide(ctrl.federated(), compute((280,) * 3), np.full(3, c)).shares for c in (0.0, 0.1))
    assert one == two


def test_a_client_with_a_slow_link_gets_the_least():
    for late in (1.0, 5.0):
        decision = decide(ctrl.federated(), compute((280,) * 3), np.array([0.0, 0.0, late]))
        assert decision.shares[2] == TAU
    sizes = tuple(int(share) for share in decision.shares)
    # All that could be done about it is done: what the others do makes the round no shorter.
    assert decide(ctrl.federated(), compute(sizes), np.array([0.0, 0.0, 5.0]), batch_sizes=sizes) is None


@given(
    st.lists(st.floats(10, 1000), min_size=3, max_size=3),
    st.lists(st.floats(0, 1), min_size=3, max_size=3),
    st.integers(3, 200),
)
def test_the_split_has_whole_minibatches_and_is_optimal(speeds, links, units):
    speed, link = np.array(speeds), np.array(links)
    sizes = tuple(TAU * (units // 3 + (units % 3 > i)) for i in range(3))
    decision = decide(ctrl.federated(dead_band=0.0), compute(sizes, speed), link, batch_sizes=sizes)
    time = rounds(link, speed)
    best = min(
        time(TAU * np.array([i, j, units - i - j])).max() for i in range(1, units - 1) for j in range(1, units - i)
    )
    if decision is None:
        assert time(np.array(sizes)).max() == pytest.approx(best)
    else:
        assert all(share % TAU == 0 for share in decision.shares)
        assert sum(decision.shares) == sum(sizes)
        assert time(np.array(decision.shares)).max() == pytest.approx(best)


def test_it_is_there_in_one_change_and_stays():
    def times(step, sizes):
        return sizes / SPEED

    sim = simulate(
        ctrl.federated(),
        times,
        [280, 280, 280],
        60,
        jitter=0.02,
        limits=ad.Limits((TAU,) * 3, (10_000,) * 3, 4 * TAU, TAU),
        values=lambda step, seconds: (seconds, LINK),
    )
    assert len(sim.changes) == 1
    assert (sim.sizes % TAU == 0).all()
    best = ctrl.timing.allocate(840, rounds(), TAU, 10_000, TAU)
    assert rounds()(sim.sizes[-1]).max() <= 1.05 * rounds()(best).max()


def test_it_follows_a_client_that_slows_down():
    def times(step, sizes):
        return sizes / (SPEED if step < 30 else SPEED * np.array([0.25, 1, 1]))

    sim = simulate(ctrl.federated(), times, [280] * 3, 80, jitter=0.02, values=lambda step, seconds: (seconds, LINK))
    slow = rounds(speed=SPEED * np.array([0.25, 1, 1]))
    best = ctrl.timing.allocate(840, slow, 1, 10_000)
    assert slow(sim.sizes[-1]).max() <= 1.05 * slow(best).max()


def test_it_waits_for_links_that_are_not_known():
    seconds = compute((280,) * 3)
    for unknown in (np.nan, -1.0):
        assert decide(ctrl.federated(), seconds, np.array([0.1, unknown, 0.1])) is None
    assert decide(ctrl.federated(), seconds, np.array([0.1, 0.2, 0.1])) is not None


def test_unreadable_values_are_refused():
    with pytest.raises(DriverError, match="one time per worker"):
        decide(ctrl.federated(), [0.1], batch_sizes=(8, 8))
    with pytest.raises(DriverError, match="one number per worker"):
        decide(ctrl.federated(), [0.1, 0.1], 0.3, batch_sizes=(8, 8))
    with pytest.raises(ValueError, match="got 3 values"):
        decide(ctrl.federated(), [0.1, 0.1], np.zeros(2), np.zeros(2), batch_sizes=(8, 8))
    with pytest.raises(ValueError, match="must not be negative"):
        ctrl.federated(dead_band=-0.1)
