"""`static` and `static_proportional`: splits by known speeds of the machines."""

from __future__ import annotations

import numpy as np

import controllers as ctrl
from tests.controllers.observations import observe, path

CORES = np.array([3.0, 5.0, 12.0])


def test_static_splits_by_capacity():
    """Tyagi & Sharma, figure 3: (3, 5, 12) cores with 64 examples each on average: 28.8, 48, 115.2."""
    policy = ctrl.published.static_proportional(CORES)
    assert path(policy, lambda b: b / CORES, [64, 64, 64], 20) == [[64, 64, 64], [29, 48, 115]]
    by_value = ctrl.published.static_proportional()
    gathered = path(by_value, lambda b: b / CORES, [64, 64, 64], 20, values=lambda step, seconds: (CORES,))
    assert gathered == [[64, 64, 64], [29, 48, 115]]


def test_an_empty_worker_slot_has_no_capacity():
    seen = observe(np.array([1.0, np.nan, 3.0]), batch_sizes=(32, 0, 32), members=(0, 2))
    decision, _ = ctrl.published.static_proportional().update(seen, ())
    assert decision.shares == (16, 0, 48)
