"""Which durations policies see, and how many steps may be skipped."""

from __future__ import annotations

from math import nan
from types import SimpleNamespace

import numpy as np
import pytest

import adaptive as ad
from adaptive.program import reports
from adaptive.program.reports import SkippedSteps, StepClock
from adaptive.runtime.finite import Trouble


@pytest.mark.parametrize(("beside_compiler", "known"), [(False, [1.0, 2.0, 3.0]), (True, [nan, nan, nan])])
def test_seconds_that_do_not_measure_the_machine_are_unknown(beside_compiler, known):
    clock = StepClock(SimpleNamespace(workers=range(4, 7)))
    np.testing.assert_array_equal(clock.compute_seconds, [nan] * 3)
    clock.record((1.0, 2.0, 3.0), beside_compiler=beside_compiler)
    np.testing.assert_array_equal(clock.compute_seconds, known)
    clock.record((1.0, 2.0, 3.0), beside_compiler=False)
    clock.forget([1])
    np.testing.assert_array_equal(clock.compute_seconds, [1.0, nan, 3.0])
    clock.began = 5.0
    clock.restart()
    np.testing.assert_array_equal([*clock.compute_seconds, clock.began], [nan] * 4)


def test_skipped_steps_are_counted_in_a_row(monkeypatch):
    monkeypatch.setattr(reports, "MOST_SKIPPED", 2)
    trouble = Trouble(["the loss is NaN", "a gradient is inf"], [], False)
    steps = SkippedSteps("skip")
    assert steps.check(trouble, 1) == ["skipped: the loss is NaN", "skipped: a gradient is inf"]
    assert (steps.check(None, 2), steps.in_a_row) == ([], 0)
    steps.check(trouble, 3)
    steps.check(trouble, 4)
    assert steps.in_a_row == 2
    with pytest.raises(ad.NonFiniteError, match="The state is that of step 2"):
        steps.check(trouble, 5)
    assert SkippedSteps("raise").raises
    assert not SkippedSteps("skip").raises
