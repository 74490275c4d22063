"""`balance` on steps of a few milliseconds: what it looks at, and what it does where a split does not pay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import controllers as ctrl
from controllers.policies.probation import COMPARING, FREE, LEAST, MOST, ON_PROBATION, SOON, Probation
from controllers.simulate import simulate
from controllers.timing.stretch import Stretch

from .observations import observe

# --- stretches --------------------------------------------------------------------------------------------------------


def looks_of(steps, enough):
    """The looks at steps, which are `(sizes, seconds)`."""
    stretch, looks = Stretch.init(2), []
    for sizes, seconds in steps:
        stretch, ended = stretch.add(sizes, np.asarray(seconds, float), enough)
        looks += ended
    return looks


def test_short_steps_are_added_up_and_looked_at_as_their_mean():
    steps = [((4, 4), (0.01, 0.02)), ((4, 4), (0.02, 0.01)), ((4, 4), (0.03, 0.01)), ((4, 4), (0.01, 0.01))]
    first, second = looks_of(steps[1:2] * 1 + steps, 0.04)
    assert (first.steps, first.sizes.tolist()) == (2, [4, 4])  # the very first step is left out
    np.testing.assert_allclose(first.seconds, [0.015, 0.015])
    assert first.slowest == pytest.approx(0.02)
    assert second.steps == 2


def test_a_change_of_sizes_ends_a_stretch_and_its_first_step_is_left_out():
    steps = [((4, 4), (0.01, 0.01))] * 3 + [((5, 3), (9e-3, 0.02))] + [((5, 3), (0.01, 0.01))] * 3
    first, second = looks_of(steps, 0.03)
    assert (first.sizes.tolist(), first.steps) == ([4, 4], 2)
    assert (second.sizes.tolist(), second.steps) == ([5, 3], 3)
    np.testing.assert_allclose(second.seconds, [0.01, 0.01])


def test_a_long_step_is_a_stretch_even_at_new_sizes():
    looks = looks_of([((4, 4), (0.1, 0.2)), ((5, 3), (0.1, 0.2))], 0.1)
    assert [(look.steps, look.sizes.tolist()) for look in looks] == [(1, [4, 4]), (1, [5, 3])]


def test_what_is_not_known_is_left_out_of_a_mean():
    steps = [((4, 4), (0.01, 0.01)), ((4, 4), (np.nan, 0.02)), ((4, 4), (0.03, 0.04)), ((4, 0), (0.03, np.nan))]
    (look, *_) = looks_of(steps, 1.0)
    np.testing.assert_allclose(look.seconds, [0.03, 0.03])
    (look,) = looks_of([((4, 0), (0.03, np.nan))] * 4, 0.09)
    np.testing.assert_allclose(look.seconds, [0.03, np.nan])


@given(st.lists(st.tuples(st.sampled_from([(4, 4), (5, 3)]), st.tuples(st.floats(0, 1), st.floats(0, 1))), max_size=30))
def test_without_a_length_every_step_is_looked_at(steps):
    looks = looks_of(steps, 0.0)
    assert [look.sizes.tolist() for look in looks] == [list(sizes) for sizes, _ in steps]
    for look, (_, seconds) in zip(looks, steps, strict=True):
        np.testing.assert_array_equal(look.seconds, np.where(np.array(seconds) > 0, seconds, np.nan))


def test_a_policy_looks_once_in_25_ms_whatever_a_step_takes():
    for seconds, looks in ((1e-3, 3), (5e-3, 19), (0.025, 100)):
        policy = ctrl.balance()
        state = policy.init(2)
        for step in range(1, 101):
            _, state = policy.update(
                observe(np.array([seconds, seconds]), step=step, batch_sizes=(8, 8), due=step % 10 == 0), state
            )
        assert state.model.stay.max() + 1 == looks  # the first is left out


# --- probation --------------------------------------------------------------------------------------------------------

OLD, NEW = np.array([8, 8]), np.array([12, 4])


def after(probation, sizes, seconds):
    for second in seconds:
        probation = probation.see(sizes, second, 5)
    return probation


def moved(before):
    return after(Probation.init(2), OLD, before).moved(OLD, 0.3)


def jittered(mean, count, seed=0):
    return mean * np.random.default_rng(seed).lognormal(0, 0.05, count)


def test_a_split_that_pays_is_kept():
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


def test_it_comes_back_where_everything_has_become_slower():
    probation = after(moved(jittered(1.0, 10)), NEW, jittered(1.5, LEAST))
    _, probation = probation.verdict(NEW)
    split, probation = after(probation, OLD, jittered(2.0, LEAST)).verdict(OLD)
    assert split.tolist() == NEW.tolist()
    assert (probation.phase, probation.wait) == (FREE, 0)


def test_it_does_not_where_the_old_one_is_as_fast_as_it_was():
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


# --- simulated --------------------------------------------------------------------------------------------------------


def over_equal(times, steps, seed, local=64, from_step=0):
    """Seconds with `balance` over those with equal batches, of a simulated run; the same chance in both."""
    sim = simulate(ctrl.balance(), times(seed), [local, local], steps, every=10, jitter=0.03, seed=seed)
    equal = simulate(
        ctrl.static_proportional([1, 1]), times(seed), [local, local], steps, every=10, jitter=0.03, seed=seed
    )
    return sim.seconds.max(axis=1)[from_step:].sum() / equal.seconds.max(axis=1)[from_step:].sum(), sim


def stalls(per_example, slice_, chance):
    """Worker 1 is stalled for a time slice in some steps: with `chance(seconds)` of those that it computes for."""

    def of(seed):
        rng = np.random.default_rng(seed)

        def times(step, sizes):
            seconds = sizes * per_example
            return seconds + np.array([0.0, slice_ * (rng.random() < chance(seconds[1]))])

        return times

    return of


def calls(per_example, slower, call):
    """Worker 1 is slower, and every call beyond a batch's first costs more than that."""

    def of(seed):
        return lambda step, sizes: sizes * per_example * [1, slower] + call * (np.bitwise_count(sizes) - 1.0)

    return of


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "times",
    [
        stalls(2e-5, 4e-3, lambda seconds: 0.5),  # whatever the batch is: there is nothing to be gained
        stalls(2e-5, 4e-3, lambda seconds: 250 * seconds),  # as many as it computes for
        stalls(1e-4, 4e-3, lambda seconds: 125 * seconds),
        calls(2e-5, 1.5, 1e-3),
    ],
    ids=["stalls", "a neighbor", "longer steps", "calls"],
)
def test_short_steps_are_never_longer_than_with_equal_batches(times, seed):
    ratio, _ = over_equal(times, 3000, seed, from_step=1000)
    assert ratio < 1.02


def test_a_split_that_costs_more_calls_than_it_saves_is_left_and_not_tried_soon_again():
    ratio, sim = over_equal(calls(2e-5, 1.5, 1e-3), 3000, 0)
    assert sim.sizes[-1].tolist() == [64, 64]
    assert 2 <= len(sim.changes) <= 6
    assert ratio < 1.05
    old = simulate(
        ctrl.balance(stretch_seconds=0), calls(2e-5, 1.5, 1e-3)(0), [64, 64], 3000, every=10, jitter=0.03, seed=0
    )
    assert old.sizes[-1].tolist() != [64, 64]  # the model of times alone does not see it


def test_short_steps_are_balanced_where_that_pays():
    def times(step, sizes):
        return sizes * np.array([2e-5, 6e-5])

    sim = simulate(ctrl.balance(), times, [64, 64], 600, every=10, jitter=0.03, seed=1)
    assert sim.seconds.max(axis=1)[-100:].mean() < 0.52 * 64 * 6e-5  # 0.5 with the best split
    assert len(sim.changes) <= 4


def test_a_neighbor_who_comes_and_goes_is_followed_in_short_steps():
    def times(step, sizes):
        return sizes * np.array([2e-5, 6e-5 if 600 < step <= 2000 else 2e-5])

    sim = simulate(ctrl.balance(), times, [64, 64], 3500, every=10, jitter=0.03, seed=1)
    step = sim.seconds.max(axis=1)
    assert step[1500:2000].mean() < 0.55 * 64 * 6e-5
    assert step[3000:].mean() < 1.1 * 64 * 2e-5
