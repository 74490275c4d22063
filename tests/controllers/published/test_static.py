"""`static` and `static_proportional`: splits by known speeds of the machines."""

from __future__ import annotations

import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from adaptive.base.errors import DriverError
from tests.controllers.observations import path

CORES = np.array([3.0, 5.0, 12.0])


def test_static_splits_by_capacity():
    """Tyagi & Sharma, figure 3: (3, 5, 12) cores with 64 examples each on average: 28.8, 48, 115.2."""
    policy = ctrl.published.static_proportional(CORES)
    assert path(policy, lambda b: b / CORES, [64, 64, 64], 20) == [[64, 64, 64], [29, 48, 115]]
    by_value = ctrl.published.static_proportional()
    gathered = path(by_value, lambda b: b / CORES, [64, 64, 64], 20, values=lambda step, seconds: (CORES,))
    assert gathered == [[64, 64, 64], [29, 48, 115]]


def test_the_error_of_static_without_capacities_says_how_to_gather_them():
    for values in ((), (np.ones(2),), (3.0,)):
        with pytest.raises(DriverError, match=r"ctrl\.published\.cores"):
            ctrl.published.static_proportional().check(values, 3, "static_proportional")


def test_cores_are_counted_in_a_program():
    def driver(state, batch):
        ctrl.hook(ctrl.published.static_proportional(), comm.all_gather(ctrl.published.cores()))
        return state, {"cores": comm.all_gather(ctrl.published.cores())}

    program = ad.Program(driver, np.zeros((), np.float32), {"x": np.zeros((8, 1), np.float32)}, global_batch=4)
    assert program.step().metrics["cores"][0] >= 1
