"""`schedule`: the global batch by step or by epoch."""

from __future__ import annotations

import numpy as np
import pytest

import controllers as ctrl
from tests.controllers.observations import observe


def asked(policy, *values, **kwargs):
    """The global batch that a policy without memory requests; None without a request."""
    decision, state = policy.update(observe(*values, **kwargs), policy.init(2))
    assert state == policy.init(2)
    return None if decision is None else decision.global_batch


def test_a_schedule_of_steps():
    policy = ctrl.schedule({0: 64, 10: 128, 100: 512})
    assert asked(policy, step=9) is None
    assert asked(policy, step=10) == 128
    assert asked(policy, step=10, global_batch=128) is None
    assert asked(policy, step=10**6) == 512
    assert asked(policy, step=10**6, due=False) is None


def test_a_schedule_of_epochs_and_by_a_function():
    assert asked(ctrl.schedule({0: 64, 0.5: 96}, by="epoch"), step=50) == 96
    assert asked(ctrl.schedule(lambda step: np.float32(64.4 * step)), step=2) == 129


def test_schedules_without_a_beginning_are_refused():
    for wrong in ({}, {10: 64}):
        with pytest.raises(ValueError, match="the first entry must be for 0"):
            ctrl.schedule(wrong)
    with pytest.raises(ValueError, match="'minute'"):
        ctrl.schedule({0: 1}, by="minute")
