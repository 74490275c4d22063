"""`goodput_workers`: the number of workers settles where goodput is near its best."""

from __future__ import annotations

import math

import numpy as np
import pytest

import controllers as ctrl
from adaptive.base.decision import Limits
from adaptive.base.errors import DriverError
from controllers.policies.goodput import MOST_NUMBERS, _numbers, _Rule
from controllers.simulate import Cluster, Hooked, jitter, simulate
from controllers.timing._allocate import fill
from tests.controllers.observations import observe

UNIT, FIXED = 1e-3, 0.02
ALIKE = ctrl.timing.BatchTime(np.full(8, UNIT), np.full(8, FIXED))


def cluster_of(times=ALIKE, per_worker=0.01, phi=1024.0, first=2, **more):
    options = {"noise": jitter(0.02), "first": first, "join_after": 3, "upper": 2000} | more
    return Cluster(times, overhead=lambda n: 0.005 + per_worker * (n - 1), noise_scale=lambda examples: phi, **options)


def settled(cluster, batch, steps=600, **settings):
    hook = Hooked(ctrl.goodput_workers(**settings), ("noise_scale", "seconds", "iteration_seconds"), 20)
    return simulate([hook], cluster, batch, steps)


def goodput(cluster, n, batch):
    """That of the first n workers."""
    times = ctrl.timing.BatchTime(*(np.broadcast_to(part, 8)[:n] for part in cluster.times))
    sizes = fill(batch, times, np.ones(n, np.int64), np.full(n, 10**4))
    seconds = float(times(sizes).max()) + cluster.overhead_of(n)
    return batch / seconds * ctrl.timing.efficiency(cluster.noise_scale(0), batch)


def test_of_hundreds_of_workers_few_numbers_are_compared_and_always_the_next_ones():
    rule = _Rule("", growth=4.0, gain=1.0, factor=1.0, multiple=None, min_batch=None, max_batch=None, workers=(1, 400))
    numbers = _numbers(rule, observe(batch_sizes=(8,) * 100, workers=(100, 1, 400)))
    assert {25, 99, 100, 101, 400} <= set(numbers)
    assert len(numbers) <= MOST_NUMBERS + 3


@pytest.mark.long
@pytest.mark.parametrize("per_worker", [0.0, 0.01, 0.05])
@pytest.mark.parametrize(("first", "batch"), [(2, 256), (8, 2048), (1, 64)])
def test_workers_and_batch_settle_where_goodput_is_near_its_best(per_worker, first, batch):
    """Where workers cost nothing; found by trying all. Who has seen one number of workers only, as from 8, does not
    know how the exchange goes with it."""
    cluster = cluster_of(per_worker=per_worker, first=first)
    simulation = settled(cluster, batch, 1500, worth=0.0)
    n, total = int(simulation.workers[-1]), int(simulation.global_batch[-1])
    best = max(goodput(cluster, k, b) for k in range(1, 9) for b in range(32, 2200, 32))
    assert best / goodput(cluster, n, total) < 1.12
    assert len(np.flatnonzero(np.diff(simulation.workers[700:]))) == 0  # it has come to rest


def test_a_slow_worker_that_was_measured_is_not_asked_for_again():
    """The worker joins for a while, gains nothing, returns to the reserve, and is remembered."""
    slow = ctrl.timing.BatchTime(np.array([UNIT, UNIT, 100 * UNIT]), np.array([FIXED, FIXED, 2.0]))
    simulation = settled(cluster_of(slow, first=3), 256, 400)
    assert simulation.workers[0] == 3
    assert (simulation.workers[200:] == 2).all()


def test_goodput_workers_stays_within_its_bounds():
    simulation = settled(cluster_of(per_worker=0.0), 256, 300, worth=0.0, max_workers=4, max_batch=600, growth=1.5)
    assert simulation.workers.max() == 4
    assert simulation.global_batch.max() <= 600
    steps = simulation.workers[1:] / simulation.workers[:-1]
    assert steps.max() <= 1.5
    assert (settled(cluster_of(per_worker=1.0, first=4), 256, steps=200, min_workers=3).workers >= 3).all()
    assert settled(cluster_of(per_worker=1.0, first=2), 256, steps=200).workers[-1] == 1


def test_goodput_workers_waits_for_requested_workers():
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


def test_one_worker_is_compared_by_one_that_takes_examples():
    """Worker 0 has no examples, and one of the other two has half their speed."""
    limits = Limits((0, 1, 1), (0, 1000, 1000))
    policy, decision = ctrl.goodput_workers(worth=0.2), None
    state = policy.init(3)
    for step in range(1, 41):
        seen = {"batch_sizes": (0, 100, 100), "workers": (3, 1, 3), "limits": limits, "due": step == 40, "step": step}
        decision, state = policy.update(observe(2000.0, np.array([np.nan, 0.12, 0.12]), 0.5, **seen), state)
    assert decision.workers is None
    assert decision.global_batch > 200


def test_values_of_goodput_workers_are_checked():
    with pytest.raises(DriverError, match=r"ctrl.goodput_workers\(\)"):
        ctrl.goodput_workers().check((1.0, np.ones(3), 1.0), 2, "goodput_workers")
    for wrong in ({"growth": 1.0}, {"gain": 0.9}, {"factor": 0.0}, {"worth": -0.1}, {"worth": 1.1}, {"min_workers": 0}):
        with pytest.raises(ValueError, match="goodput_workers"):
            ctrl.goodput_workers(**wrong)
