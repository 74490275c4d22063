"""`lb_bsp`: splits by predicted speeds, and refuses inputs that it was not made for."""

from __future__ import annotations

import numpy as np
import pytest

import controllers as ctrl
from adaptive.base.errors import DriverError


def test_lb_bsp_warns_of_unsuitable_inputs():
    check = ctrl.published.lb_bsp(n_inputs=1).check
    with pytest.raises(ValueError, match="n_inputs=2"):
        check((np.ones(2), np.ones(2), np.ones(2)), 2, "lb_bsp")
    with pytest.raises(DriverError, match="after the times"):
        check((np.ones(2), np.ones(3)), 2, "lb_bsp")


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="must"):
        ctrl.published.lb_bsp(dead_band=-1)
