"""What hooks capture is copied after each trace; differences are named, and what changes by itself is none."""

from __future__ import annotations

import threading
import types

import jax.numpy as jnp
import numpy as np
import pytest

import collectives as comm
import controllers as ctrl
from adaptive.graph import closures
from adaptive.graph.closures import variables_of
from tests.adaptive.drivers import FEATURES, planner

W = jnp.zeros(FEATURES)


def captured(function):
    return {v.name: v.copy for v in variables_of([function]) if not v.name.startswith("code of")}


def copy_of(made):
    return captured(lambda: made)["made, which <lambda>() closes over"]


@pytest.mark.parametrize("one", [3, 2.5, "a", None, [1, (2.0, {"a": {3, "b"}})], np.arange(3), range(4), slice(2)])
@pytest.mark.parametrize("other", [4, 3.0, "b", [1, (2.0, {"a": {3, "c"}})], np.arange(4), np.arange(3.0), range(5)])
def test_copies_are_equal_if_the_values_are(one, other):
    assert copy_of(one) == copy_of(one) is not None
    assert copy_of(one) != copy_of(other)


def test_objects_of_other_kinds_have_no_copy():
    for thing in (threading.Lock(), types.SimpleNamespace(n=3), [object()], np.array([1, "a", None], object)):
        assert copy_of(thing) is None


def test_a_copy_stays_when_the_object_changes():
    kept = {"n": [1], "table": np.zeros(4)}
    before = copy_of(kept)
    kept["n"].append(2)
    assert copy_of(kept) != before
    kept["n"].pop()
    assert copy_of(kept) == before
    kept["table"][3] = 1
    assert copy_of(kept) != before


def test_later_traces_do_not_read_what_hooks_may_be_writing_to(monkeypatch):
    history = {}

    def driver(state, batch):
        ctrl.hook(lambda control, value: history.update(n=value), comm.all_reduce(batch["y"].mean()))
        return state, {}

    plan = planner(driver, W)
    plan.begin(8)
    monkeypatch.setattr(closures, "variables_of", None)
    plan(3)
