"""The fastest split of a batch is found under noise, at little cost, and stays found."""

from __future__ import annotations

import numpy as np
import pytest

from adaptive.runtime.kernels import contest as _contest
from adaptive.runtime.kernels.contest import Contest

SIZE = 1024
RUNS, STEPS = 20, 160


def ways(seconds):
    """Seconds of each split into equal calls, whose seconds are a function of their size; 0.1 ms more if several."""
    sizes = [1 << i for i in range(SIZE.bit_length())]
    return {(k,) * (SIZE // k): SIZE // k * seconds(k) + 1e-4 * (k < SIZE) for k in sizes}


MODELS = {
    "a call costs little": lambda k: 20e-6 + 10e-6 * k,
    "a call costs much": lambda k: 1e-3 + 10e-6 * k,
    "a third slower from 256 on": lambda k: 60e-6 + (44e-6 if k <= 128 else 60e-6 if k <= 256 else 86e-6) * k,
    "two sizes are equally fast": lambda k: 80e-6 + 10e-6 * k * (1.02 if k > 512 else 1),
}


def quiet(rng, steps):
    """Each step differs by 2 %."""
    return np.exp(rng.normal(0, 0.02, steps))


def drifting(rng, steps):
    """The machine grows slower and faster, by a third and more."""
    return quiet(rng, steps) * np.exp(np.cumsum(rng.normal(0, 0.02, steps)))


def beside_a_neighbor(rng, steps):
    """A third of the steps take half as long again."""
    return quiet(rng, steps) * (1 + (rng.random(steps) < 0.3) * rng.exponential(0.5, steps))


def beside_a_compiler(rng, steps):
    """For dozens of steps at a time all take 1.6 times as long."""
    factors = quiet(rng, steps)
    for start in range(0, steps, 100):
        begin = start + rng.integers(0, 50)
        factors[begin : begin + rng.integers(10, 50)] *= 1.6
    return factors


MACHINES = [quiet, drifting, beside_a_neighbor, beside_a_compiler]


def run(contest, seconds, factors):
    """Take steps. Returns their seconds without the noise."""
    taken, left, since = [], 0, 1
    for factor in factors:
        if left:
            left, since, split = left - 1, since + 1, contest.best
        else:
            split, timed, left = contest.next(since)
            since = 1
            if timed:
                contest.record(split, seconds[split] * factor)
        taken.append(seconds[split])
    return np.array(taken)


def wrongly(seconds, rng, spread=0.1):
    """A prediction."""
    return {split: s * np.exp(rng.normal(0, spread)) for split, s in seconds.items()}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_the_best_is_found_to_three_percent(model, machine):
    seconds, right, lost = ways(MODELS[model]), 0, []
    least = min(seconds.values())
    for seed in range(RUNS):
        rng = np.random.default_rng(seed)
        contest = Contest(wrongly(seconds, rng, 0.05))
        taken = run(contest, seconds, machine(rng, STEPS))
        right += seconds[contest.best] <= 1.03 * least
        lost.append(taken.mean() / least - 1)
    assert right >= RUNS - 1
    assert np.mean(lost) < 0.06


@pytest.mark.parametrize("machine", MACHINES)
def test_the_best_stays_found_at_little_cost(machine):
    seconds = ways(MODELS["a call costs little"])
    for seed in range(5):
        rng = np.random.default_rng(seed)
        contest = Contest(seconds)
        taken = run(contest, seconds, machine(rng, 5000))
        assert seconds[contest.best] <= 1.03 * min(seconds.values())
        assert taken[STEPS:].mean() < 1.02 * min(seconds.values())


@pytest.mark.parametrize("machine", [quiet, beside_a_neighbor])
def test_a_wrong_decision_is_corrected(machine):
    """However wrong all timings of the first comparison were."""
    rng = np.random.default_rng(0)
    wrong = {(8,): 1.5, (4, 4): 1.0, (2, 2, 2, 2): 1.2}
    truth = {(8,): 1.0, (4, 4): 1.1, (2, 2, 2, 2): 1.2}
    contest = Contest(wrong)
    run(contest, wrong, quiet(rng, 100))
    assert contest.best == (4, 4)
    run(contest, truth, machine(rng, 3000))
    assert contest.best == (8,)
    run(contest, wrong, machine(rng, 30_000))
    assert contest.best == (4, 4)


def test_a_wrong_prediction_does_not_exclude_a_split_for_ever():
    truth = {(8,): 1.0, (4, 4): 1.1, (2, 2, 2, 2): 0.8}
    contest = Contest(truth | {(2, 2, 2, 2): 1.5})
    run(contest, truth, np.ones(60))
    assert contest.best == (8,)
    run(contest, truth, np.ones(10_000))
    assert contest.best == (2, 2, 2, 2)


def test_of_equally_fast_splits_the_one_with_fewest_microbatches_is_used():
    for gain, best in ((0.01, (8,)), (0.04, (4, 4))):
        seconds = {(8,): 1.0, (4, 4): 1.0 - gain}
        contest = Contest(seconds)
        run(contest, seconds, np.ones(100))
        assert contest.best == best


def test_slow_splits_drop_out_early_and_hopeless_ones_are_not_tried():
    seconds = {(8,): 1.0, (4, 4): 1.15, (2,) * 4: 2.0, (1,) * 8: 40.0}
    contest, taken = Contest(seconds), []
    for _ in range(5000):
        split, timed, _ = contest.next()
        taken.append(split)
        if timed:
            contest.record(split, seconds[split])
    assert taken[:60].count((4, 4)) <= 10
    assert (2,) * 4 not in taken[:60]
    assert 0 < taken.count((2,) * 4) <= 10
    assert (1,) * 8 not in taken


def test_a_single_split_is_not_timed():
    contest = Contest({(3,): 1.0})
    assert contest.decided
    for _ in range(100):
        split, timed, steps = contest.next()
        assert (split, timed) == ((3,), False)
        assert steps > 0


def test_gaps_grow_while_nothing_changes():
    seconds = {(8,): 1.0, (4, 4): 1.01}
    contest, timed = Contest(seconds), []
    for step in range(4000):
        split, wanted, _ = contest.next()
        if wanted:
            contest.record(split, seconds[split])
            timed.append(step)
    late = np.diff([step for step in timed if step > 100])
    assert late.max() == pytest.approx(_contest._LONGEST_GAP, abs=2)
    gaps = late[late > 1]
    assert list(gaps) == sorted(gaps)


def test_a_disturbed_round_is_taken_again():
    contest = Contest({(8,): 1.0, (4, 4): 1.01})
    first, _, _ = contest.next()
    contest.record(first, 1.0)
    contest.discard()
    again, timed, _ = contest.next()
    assert (again, timed) == (first, True)


def test_unrecorded_trials_are_not_waited_for():
    contest = Contest({(8,): 1.0, (4, 4): 1.01})
    timed = [contest.next()[1] for _ in range(2000)]
    assert sum(timed) < 50
    assert contest.best == (8,)


def test_seconds_of_another_split_are_not_taken():
    contest = Contest({(8,): 1.0, (4, 4): 1.01})
    split, _, _ = contest.next()
    contest.record((4, 4) if split == (8,) else (8,), 1e-9)
    assert contest.next()[0] == split
