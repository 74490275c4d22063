"""Policies for the number of workers: noise scale and goodput; and how the exchange goes with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import controllers as ctrl
from adaptive.base.errors import DriverError
from controllers.policies.efficiency import efficiency
from controllers.simulate import Cluster, Hooked, jitter, simulate
from controllers.timing.allocate import fill
from controllers.timing.exchange import Exchange

from .observations import observe
from .test_global_batch import Noise


def asked(policy, *values, there=2, target=None, most=16, least=1, batch=None, **kwargs):
    """The number of workers and the batch that a policy without memory asks for; None where it asks for nothing."""
    batch_sizes = (32,) * there + (0,) * (16 - there)
    numbers = (there if target is None else target, least, most)
    seen = observe(
        *values,
        batch_sizes=batch_sizes,
        members=tuple(range(there)),
        workers=numbers,
        global_batch=32 * there if batch is None else batch,
        **kwargs,
    )
    decision, state = policy.update(seen, policy.init(16))
    assert state == ()
    return None if decision is None else (decision.workers, decision.global_batch)


# --- noise_workers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noise", "expected"),
    [
        (Noise(110, 100, 120), (3, 96)),  # from 2 of 32 each: grow to what is certain
        (Noise(110, 60, 120), None),  # 2 may be right
        (Noise(10, 5, 20), (1, 32)),  # shrink to what is certain
        (Noise(10, 5, 70), None),
        (Noise(1e6, 1e5, math.inf), (4, 128)),  # no faster than twofold
        (Noise(86, 86, 86), None),  # not worth it: 2.69 workers
        (Noise(87, 87, 87), (3, 96)),  # worth it: 2.72
        (Noise(math.nan, math.nan, math.nan), None),  # not known yet
        (Noise(1e3, 0, math.inf), None),  # known, but not to anything
        (Noise(math.inf, math.inf, math.inf), (4, 128)),
        (Noise(-3.0, math.nan, math.nan), None),
        (128.0, (4, 128)),
    ],
)
def test_workers_follow_the_bounds_of_the_noise_scale(noise, expected):
    assert asked(ctrl.noise_workers(32), noise) == expected


def test_settings_of_noise_workers():
    noise = Noise(160, 128, 192)
    assert asked(ctrl.noise_workers(32, confident=False, growth=4), noise) == (5, 160)
    assert asked(ctrl.noise_workers(32, max_workers=3), noise) == (3, 96)
    assert asked(ctrl.noise_workers(32, growth=1.5), noise) == (3, 96)
    assert asked(ctrl.noise_workers(32, growth=1.01), noise) == (3, 96)  # one more in any case
    assert asked(ctrl.noise_workers(32, factor=0.75), noise) == (3, 96)
    assert asked(ctrl.noise_workers(32, dead_band=1.0), noise) is None
    assert asked(ctrl.noise_workers(32, monotone=True), 1.0) is None
    assert asked(ctrl.noise_workers(32, min_workers=2), 1.0) is None
    assert asked(ctrl.noise_workers(32, min_workers=4), math.nan) is None
    assert asked(ctrl.noise_workers(32, min_workers=4), 1.0) == (4, 128)
    assert asked(ctrl.noise_workers(32), 1.0, there=8) == (4, 128)
    assert asked(ctrl.noise_workers(32), noise, due=False) is None


def test_what_can_be_had_goes_first():
    assert asked(ctrl.noise_workers(32, min_workers=4), 1e4, most=3) == (3, 96)
    assert asked(ctrl.noise_workers(32), 1e4, most=2) is None
    assert asked(ctrl.noise_workers(32), 1.0, there=6, least=5) == (5, 160)
    assert asked(ctrl.noise_workers(32, max_workers=2), 64.0, there=4) == (2, 64)  # brought back within bounds


def test_the_batch_is_brought_to_that_of_the_workers_and_asked_for_once():
    assert asked(ctrl.noise_workers(32), 64.0, batch=100) == (2, 64)
    assert asked(ctrl.noise_workers(32), 64.0, batch=64) is None
    assert asked(ctrl.noise_workers(32), 128.0, target=4, batch=64) is None  # on their way
    assert asked(ctrl.noise_workers(32), 256.0, target=4, batch=64) is None  # and no more before they are there
    assert asked(ctrl.noise_workers(32), 96.0, target=4, batch=64) == (3, 96)
    assert asked(ctrl.noise_workers(200), 400.0, batch=200, upper=100) is None  # all that they may hold


@pytest.mark.parametrize(
    "wrong",
    [
        {"examples_per_worker": 0},
        {"examples_per_worker": 1.5},
        {"examples_per_worker": math.nan},
        {"growth": 1.0},
        {"dead_band": -0.1},
        {"factor": 0},
        {"min_workers": 0},
        {"min_workers": 3, "max_workers": 2},
        {"max_workers": 0},
    ],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="noise_workers"):
        ctrl.noise_workers(**({"examples_per_worker": 8} | wrong))


def test_what_is_no_noise_scale_is_refused():
    with pytest.raises(DriverError, match=r"ctrl.noise_workers\(\)"):
        asked(ctrl.noise_workers(8), np.ones(3))


@given(
    scale=st.floats(0, 1e6),
    width=st.floats(1, 4),
    there=st.integers(1, 16),
    growth=st.floats(1.01, 10),
    each=st.integers(1, 500),
)
def test_one_decision_is_enough_and_within_its_bounds(scale, width, there, growth, each):
    """What is asked for is asked for once, and moves as far as the growth lets it, towards the noise scale."""
    policy, noise = ctrl.noise_workers(each, growth=growth), Noise(scale, scale / width, scale * width)
    got = asked(policy, noise, there=there, batch=each * there)
    if got is None:
        return
    n, batch = got
    assert batch == n * each
    assert 1 <= n <= 16
    assert min(there - 1, math.floor(there / growth)) <= n <= max(there + 1, math.ceil(there * growth))
    ideal = min(max(scale / each, 1), 16)
    assert abs(n - ideal) <= abs(there - ideal) + 0.5
    assert asked(policy, noise, there=there, target=n, batch=each * there) is None


# --- exchange ---------------------------------------------------------------------------------------------------------


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


# --- goodput_workers --------------------------------------------------------------------------------------------------

UNIT, FIXED = 1e-3, 0.02
ALIKE = ctrl.BatchTime(np.full(8, UNIT), np.full(8, FIXED))


def cluster_of(times=ALIKE, per_worker=0.01, phi=1024.0, first=2, **more):
    options = {"noise": jitter(0.02), "first": first, "join_after": 3, "upper": 2000} | more
    return Cluster(times, overhead=lambda n: 0.005 + per_worker * (n - 1), noise_scale=lambda examples: phi, **options)


def settled(cluster, batch, steps=1500, **settings):
    hook = Hooked(ctrl.goodput_workers(**settings), ("noise_scale", "seconds", "iteration_seconds"), 20)
    return simulate([hook], cluster, batch, steps)


def goodput(cluster, n, batch):
    """That of the first n workers."""
    times = ctrl.BatchTime(*(np.broadcast_to(part, 8)[:n] for part in cluster.times))
    sizes = fill(batch, times, np.ones(n, np.int64), np.full(n, 10**4))
    seconds = float(times(sizes).max()) + cluster.idle_seconds(n)
    return batch / seconds * efficiency(cluster.noise_scale(0), batch)


@pytest.mark.parametrize("per_worker", [0.0, pytest.param(0.01, marks=pytest.mark.long), 0.05])
@pytest.mark.parametrize(("first", "batch"), [(2, 256), (8, 2048), pytest.param(1, 64, marks=pytest.mark.long)])
def test_workers_and_batch_settle_where_goodput_is_near_its_best(per_worker, first, batch):
    """Where workers cost nothing; found by trying all. Who has seen one number of workers only, as from 8, does not
    know how the exchange goes with it."""
    cluster = cluster_of(per_worker=per_worker, first=first)
    simulation = settled(cluster, batch, worth=0.0)
    n, total = int(simulation.workers[-1]), int(simulation.global_batch[-1])
    best = max(goodput(cluster, k, b) for k in range(1, 9) for b in range(32, 2200, 32))
    assert best / goodput(cluster, n, total) < 1.12
    assert len(np.flatnonzero(np.diff(simulation.workers[700:]))) == 0  # it has come to rest


@pytest.mark.long
def test_the_more_a_worker_has_to_be_worth_the_fewer_there_are():
    numbers = [int(settled(cluster_of(), 256, worth=worth).workers[-1]) for worth in (0.0, 0.5, 1.0)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > numbers[1]
    assert numbers[2] <= 2


def test_a_slow_worker_that_was_measured_is_not_asked_for_again():
    """It is there for a while, helps nobody, goes back to the reserve, and is remembered."""
    slow = ctrl.BatchTime(np.array([UNIT, UNIT, 100 * UNIT]), np.array([FIXED, FIXED, 2.0]))
    simulation = settled(cluster_of(slow, first=3), 256)
    assert simulation.workers[0] == 3
    assert (simulation.workers[200:] == 2).all()


def test_bounds_of_goodput_workers_are_kept():
    simulation = settled(cluster_of(per_worker=0.0), 256, worth=0.0, max_workers=4, max_batch=600, growth=1.5)
    assert simulation.workers.max() == 4
    assert simulation.global_batch.max() <= 600
    steps = simulation.workers[1:] / simulation.workers[:-1]
    assert steps.max() <= 1.5
    assert (settled(cluster_of(per_worker=1.0, first=4), 256, steps=200, min_workers=3).workers >= 3).all()


def test_goodput_workers_judges_by_the_bounds_and_waits_for_who_was_asked_for():
    def once(noise, target=2):
        policy = ctrl.goodput_workers(worth=0.0)
        state, decision = policy.init(8), None
        for step in range(1, 41):
            sizes = (100, 100, *[0] * 6)
            seconds = np.array([0.12, 0.12, *[np.nan] * 6])
            numbers = {"members": (0, 1), "workers": (target, 1, 8), "upper": 1000, "batch_sizes": sizes}
            seen_step = observe(noise, seconds, 0.2, step=step, due=step == 40, **numbers)
            decision, state = policy.update(seen_step, state)
        return decision

    decision = once(2000.0)
    assert decision.workers == 4
    assert decision.global_batch > 200
    assert "times the goodput" in decision.notes[0]
    assert once(2000.0, target=3) is None
    assert once(math.nan) is None


def test_values_of_goodput_workers_are_checked():
    policy = ctrl.goodput_workers()
    with pytest.raises(DriverError, match=r"ctrl.goodput_workers\(\)"):
        policy.update(observe(1.0, np.ones(3), 1.0), policy.init(2))
    for wrong in ({"growth": 1.0}, {"gain": 0.9}, {"worth": -0.1}, {"worth": 1.1}, {"min_workers": 0}):
        with pytest.raises(ValueError, match="goodput_workers"):
            ctrl.goodput_workers(**wrong)
