"""Forecasts of a split's gain are judged on the steps after the decision, and remembered."""

from __future__ import annotations

import numpy as np
import pytest

from controllers.policies.promises import FIRST_PATIENCE, LEAST_STEPS, MOST_PATIENCE, MOST_STEPS, Promises, Trial

HERE, THERE = np.array([60, 40]), np.array([50, 50])
TO_THERE = THERE / HERE


def after(promises, seconds, steps, sizes=HERE):
    for _ in range(steps):
        promises = promises.see(sizes, np.asarray(seconds))
    return promises


def left_for_a_worse_one():
    """60 + 40 for 50 + 50, of equal workers: a step takes a fifth longer."""
    return after(Promises.init(2).taken(THERE, HERE, 1 / TO_THERE), [0.6, 0.4], LEAST_STEPS)


def test_a_trial_estimates_the_gain_of_another_split():
    trial = Trial.of(HERE, THERE, TO_THERE)
    for seconds in ([0.6, 0.4], [0.6, 0.4], [0.3, 0.4]):
        trial = trial.see(HERE, np.array(seconds))
    saved, took = np.array([0.6 - 0.5, 0.6 - 0.5, 0.4 - 0.5]), np.array([0.6, 0.6, 0.4])
    assert trial.gain == pytest.approx(saved.sum() / took.sum())
    assert trial.error == pytest.approx(np.std(saved) / np.sqrt(2) / took.mean())


def test_stalls_do_not_follow_the_batch():
    """A worker that stands still in every other step would do so with any batch: only the rest is scaled."""
    trial = Trial.of(HERE, THERE, TO_THERE)
    for stall in (0.0, 1.0, 0.0, 1.0):
        trial = trial.see(HERE, np.array([0.6, 0.4 + stall]))
    saved = np.array([0.6 - 0.5, 1.4 - 1.5, 0.6 - 0.5, 1.4 - 1.5])
    assert trial.gain == pytest.approx(saved.sum() / (0.6 + 1.4 + 0.6 + 1.4), abs=1e-12)


def test_steps_of_other_sizes_and_without_times_are_not_of_the_trial():
    trial = Trial.of(HERE, THERE, TO_THERE)
    assert trial.see(THERE, np.array([0.6, 0.4])).steps == 0
    for missing in (np.nan, np.inf, 0.0):
        assert trial.see(HERE, np.array([0.6, missing])).steps == 0


def test_a_split_worse_than_the_one_before_breaks_its_promise():
    promises = left_for_a_worse_one()
    assert promises.broken
    assert promises.back.other.tolist() == THERE.tolist()
    judged = promises.judged()
    assert judged.patience == FIRST_PATIENCE
    assert not judged.back.open


def test_the_waiting_time_doubles_after_a_wrong_forecast_and_halves_after_a_right_one():
    promises, patience = Promises.init(2), []
    for _ in range(7):
        promises = after(promises.taken(THERE, HERE, 1 / TO_THERE), [0.6, 0.4], LEAST_STEPS).judged()
        patience.append(int(promises.patience))
    assert patience == [10, 20, 40, 80, 160, 320, MOST_PATIENCE]
    for _ in range(6):
        promises = after(promises.taken(THERE, HERE, 1 / TO_THERE), [0.6, 0.9], LEAST_STEPS).judged()
        patience.append(int(promises.patience))
    assert patience[7:] == [160, 80, 40, 20, 10, 0]


def test_there_is_no_verdict_where_noise_is_larger_and_none_for_ever():
    promises = Promises.init(2).taken(THERE, HERE, 1 / TO_THERE)
    for step in range(MOST_STEPS):
        promises = promises.see(HERE, np.array([0.6, 0.4] if step % 2 else [0.5, 0.6]))
        assert promises.back.open
        assert not promises.broken
        if step < MOST_STEPS - 1:
            promises = promises.judged()
    judged = promises.judged()
    assert not judged.back.open
    assert judged.patience == 0


def test_a_proposal_must_last_for_the_waiting_time_or_be_large():
    rng = np.random.default_rng(0)
    promises = Promises.init(2)._replace(patience=np.asarray(40)).proposed(HERE, THERE, TO_THERE)
    clear = after(promises, [0.6, 0.4], LEAST_STEPS)
    assert clear.tried_enough(0.02)
    assert not after(promises, [0.6, 0.4], LEAST_STEPS - 1).tried_enough(0.02)
    assert clear.taken(HERE, THERE, TO_THERE).patience == 10  # it was no chance
    steps = 0
    while not promises.tried_enough(0.02):  # gains a sixth, under noise
        promises, steps = promises.see(HERE, np.array([0.6, 0.4]) * (1 + 0.25 * rng.standard_normal(2))), steps + 1
        assert steps < 200
    assert steps >= 40


def test_trials_end_with_the_split_or_the_batch_that_they_are_of_or_when_others_take_part():
    promises, both = left_for_a_worse_one().proposed(HERE, THERE, TO_THERE), np.array([0, 1])
    same = promises.without_others(HERE, both, 100)
    assert same.back.open
    assert same.ahead.open
    for end in ((THERE, both, 100), (HERE, both, 200), (HERE, np.array([0]), 100)):
        other = promises.without_others(*end)
        assert not other.back.open
        assert not other.ahead.open


def test_workers_without_examples_are_not_waited_for():
    here, there = np.array([60, 0, 40]), np.array([50, 0, 50])
    trial = Trial.of(here, there, np.array([5 / 6, 1, 5 / 4]))
    assert trial.see(here, np.array([0.6, np.nan, 0.4])).gain == pytest.approx(1 - 0.5 / 0.6)
    assert trial.see(here, np.array([0.6, 9.0, np.nan])).steps == 0
