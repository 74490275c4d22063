"""Hooks in a driver: what may be given to them."""

from __future__ import annotations

import jax
import pytest

import adaptive as ad
from adaptive import operators
from tests.adaptive.drivers import Recorder, traced


def test_a_mapped_hook_is_refused():
    def driver(state, batch):
        jax.vmap(lambda y: operators.hook("h", Recorder(), (y,)))(batch["y"])
        return state, {}

    with pytest.raises(ad.CollectiveError, match=r"mapped by jax\.vmap"):
        traced(driver, 0.0)
