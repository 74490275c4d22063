"""A new split is compared with the one before, and left if it does not pay."""

from __future__ import annotations

import numpy as np
import pytest

from controllers.policies.probation import COMPARING, FREE, LEAST, MOST, ON_PROBATION, SOON, Pace, Probation

OLD, NEW = np.array([8, 8]), np.array([12, 4])


def after(probation, sizes, seconds):
    for second in seconds:
        probation = probation.see(sizes, second, 5)
    return probation


def moved(before):
    return after(Probation.init(2), OLD, before).moved(OLD, 0.3)


def jittered(mean, count, seed=0):
    return mean * np.random.default_rng(seed).lognormal(0, 0.05, count)


def test_a_faster_split_is_kept():
    split, probation = after(moved(jittered(1.0, 10)), NEW, jittered(0.8, LEAST)).verdict(NEW)
    assert split is None
    assert (probation.phase, probation.wait) == (FREE, 0)


@pytest.mark.parametrize(("mean", "looks"), [(1.4, SOON), (1.15, LEAST), (1.0, MOST)])
def test_a_split_that_does_not_pay_is_left(mean, looks):
    probation = moved(jittered(1.0, 10))
    for second in jittered(mean, looks, seed=1):
        split, judged = probation.verdict(NEW)
        assert split is None
        probation = judged.see(NEW, second, 5)
    split, probation = probation.verdict(NEW)
    assert split.tolist() == OLD.tolist()
    assert (probation.phase, probation.wait) == (COMPARING, 160)


def test_the_old_split_returns_if_all_workers_became_slower():
    probation = after(moved(jittered(1.0, 10)), NEW, jittered(1.5, LEAST))
    _, probation = probation.verdict(NEW)
    split, probation = after(probation, OLD, jittered(2.0, LEAST)).verdict(OLD)
    assert split.tolist() == NEW.tolist()
    assert (probation.phase, probation.wait) == (FREE, 0)


def test_the_new_split_stays_if_the_old_one_would_be_no_faster():
    probation = after(moved(jittered(1.0, 10)), NEW, jittered(1.5, LEAST))
    _, probation = probation.verdict(NEW)
    split, probation = after(probation, OLD, jittered(1.0, MOST)).verdict(OLD)
    assert split is None
    assert probation.phase == FREE
    assert not probation.allows(OLD, 0.3, steps=5)
    assert probation.allows(OLD, 0.5, steps=5)  # far more than was promised in vain
    assert after(probation, OLD, jittered(1.0, 160)).allows(OLD, 0.3, steps=5)


def test_patience_grows_with_every_split_that_does_not_pay():
    probation, waits = moved(jittered(1.0, 10)), []
    for _ in range(5):
        _, probation = after(probation, NEW, jittered(1.5, LEAST)).verdict(NEW)
        waits.append(int(probation.wait))
        _, probation = after(probation, OLD, jittered(1.0, MOST)).verdict(OLD)
        probation = probation.moved(OLD, 0.3)
    assert waits == [160, 640, 2560, 2560, 2560]


def test_nothing_is_judged_before_the_new_split_is_in_force():
    probation = after(moved(jittered(1.0, 10)), OLD, jittered(1.0, 2 * MOST))
    split, probation = probation.verdict(OLD)
    assert split is None
    assert probation.phase == ON_PROBATION


def test_single_steps_are_not_waited_for():
    probation = Probation.init(2).see(OLD, 1.0, 1)
    assert probation.allows(OLD, 0.1, steps=1)
    assert probation.moved(OLD, 0.1).phase == FREE
    assert not after(Probation.init(2), OLD, [1.0]).allows(OLD, 0.1, steps=5)


def test_another_global_batch_ends_a_comparison():
    probation = after(moved(jittered(1.0, 10)), NEW, jittered(1.5, LEAST))
    assert probation.without_others(NEW, 32).phase == FREE
    assert probation.without_others(NEW, 16).phase == ON_PROBATION


def test_a_pace_is_the_mean_of_all_measurements_of_one_split():
    pace = Pace.init(2).see(OLD, 1.0).see(OLD, 3.0)
    assert (int(pace.looks), float(pace.mean), float(pace.variance)) == (2, 2.0, 1.0)


def test_a_look_at_another_split_starts_over_and_counts():
    pace = Pace.init(2).see(OLD, 9.0).see(NEW, 1.0).see(NEW, 3.0)
    assert pace.sizes.tolist() == NEW.tolist()
    assert (int(pace.looks), float(pace.mean), float(pace.variance)) == (2, 2.0, 1.0)
