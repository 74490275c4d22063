"""Hooks in a driver: what may be given to them."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import adaptive as ad
from adaptive import operators
from tests.adaptive.drivers import Recorder, planned, traced


def test_a_hook_takes_numbers_arrays_and_trees():
    def driver(state, batch):
        operators.hook("h", Recorder(), (1, 2.0, np.zeros(2), {"a": [state]}))
        return state, {}

    (hook,) = planned(driver, 0.0).hooks
    assert [a.aval.shape for a in hook.values] == [(), (), (2,), ()]


def test_a_mapped_hook_is_refused():
    def driver(state, batch):
        jax.vmap(lambda y: operators.hook("h", Recorder(), (y,)))(batch["y"])
        return state, {}

    with pytest.raises(ad.CollectiveError, match=r"mapped by jax\.vmap"):
        traced(driver, 0.0)
