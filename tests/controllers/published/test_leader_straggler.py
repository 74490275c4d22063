"""`leader_straggler`, against the adjustments that were published."""

from __future__ import annotations

import numpy as np
import pytest

import controllers as ctrl
from controllers.simulate import simulate
from tests.controllers.observations import path

LBB = ctrl.timing.BatchTime(  # milliseconds; Table 2 of LBB
    np.array([0.5931, 0.5808, 0.6023, 2.6714]), np.array([5.896, 7.152, 8.291, 50.982])
)


@pytest.mark.parametrize(("step", "adjustments"), [(1, 108), (5, 23), (16, 10)])
def test_adjustments_on_the_four_gpus_of_lbb(step, adjustments):
    tried = path(ctrl.published.leader_straggler(step=step, window=1), LBB, [128] * 4, 500)
    assert len(tried) - 1 == adjustments
    assert 104.4 <= LBB(tried[-1]).max() <= 104.75


def test_a_worker_short_of_memory_is_not_given_more():
    free = np.array([1e9, 1e6, np.nan, 1e9])
    policy = ctrl.published.leader_straggler(window=1, min_free_bytes=1e8)
    tried = path(policy, LBB, [128] * 4, 500, values=lambda step, seconds: (seconds, free))
    assert max(sizes[1] for sizes in tried) == 128
    assert tried[-1][0] > 128
    assert tried[-1][2] > 128


def test_it_rests_with_coarse_sizes_and_resumes_when_times_differ():
    def times(step, b):
        return b * np.array([1.0, 1.4]) * (1 if step < 200 else np.array([2.0, 1.0]))

    sim = simulate(ctrl.published.leader_straggler(window=1), times, [5, 5], 400)
    assert len(sim.changes[(sim.changes > 50) & (sim.changes < 200)]) == 0
    assert len(sim.changes[sim.changes >= 200]) >= 1
    assert len(sim.changes[sim.changes >= 250]) == 0
    assert sim.sizes[-1].tolist() in ([4, 6], [5, 5])


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="must"):
        ctrl.published.leader_straggler(step=0)
