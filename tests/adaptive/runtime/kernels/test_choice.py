"""The choice of microbatches: when the splits of a size are timed again."""

from __future__ import annotations

from adaptive.runtime.kernels import timings
from adaptive.runtime.kernels.choice import Chooser

KERNELS = (4, 8)


def chooser():
    """A chooser whose first comparison of the splits of 8 examples is over: one kernel of 8, or two of 4."""
    made = Chooser()
    for size in KERNELS:
        for _ in range(timings.SAMPLES):
            made.times.record(size, 0.01 * size)
    flags = steps(made, [8] * 200)
    assert 2 < sum(flags) < 100  # compared, and then used
    return made


def steps(made, sizes):
    """Take steps of these sizes. Returns whether each was timed."""
    flags = []
    for size in sizes:
        choice = made.choice
        if size == made.size and choice.steps:
            choice.steps -= 1
        else:
            choice = made.choose(size, 1, KERNELS, quiet=True)
        if choice.timed:
            made.record(0, 0.01 * size)
            made.step_ended(disturbed=False)
        flags.append(choice.timed)
    return flags


def steps_until_timed(made, sizes):
    """Return the number of steps of 8 examples before the next one that is timed."""
    for number in range(1000):
        if steps(made, sizes)[-1]:
            return number
    raise AssertionError("not timed again")


def after_a_round():
    """A chooser that has just timed both splits again."""
    made = chooser()
    steps_until_timed(made, [8])
    assert steps(made, [8]) == [True]
    return made


def test_the_splits_of_a_size_are_timed_again_at_growing_intervals():
    made = after_a_round()
    first = steps_until_timed(made, [8])
    steps(made, [8])
    assert 10 < first < steps_until_timed(made, [8])


def test_steps_at_another_size_do_not_bring_the_next_comparison_forward():
    made = after_a_round()
    steps(made, [4] * 1000)
    assert steps_until_timed(made, [8]) >= steps_until_timed(after_a_round(), [8]) - 1


def test_steps_that_alternate_with_another_size_count():
    alone = steps_until_timed(after_a_round(), [8])
    assert abs(steps_until_timed(after_a_round(), [4, 8]) - alone) <= 1
