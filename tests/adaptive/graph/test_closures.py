"""What hooks capture is copied after each trace; differences are named, and what changes by itself is none."""

from __future__ import annotations

import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
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


def mean(batch):
    return comm.all_reduce(batch["y"].mean())


def test_a_hook_or_callback_that_captures_a_traced_value_is_refused():
    def with_a_callback(state, batch):
        loss = mean(batch)
        jax.debug.callback(lambda x: print(loss), batch["y"][0])
        return state + loss, {}

    def with_a_policy(state, batch):
        loss = mean(batch)
        ctrl.hook(ctrl.Policy(lambda n: (), lambda seen, state: (loss, state)), loss)
        return state + loss, {}

    for driver in (with_a_callback, with_a_policy):
        with pytest.raises(ad.DriverError, match="closes over a traced value: loss"):
            planner(driver, W).begin(8)


def test_a_traced_value_that_the_next_trace_reads_is_refused():
    store = types.SimpleNamespace(deep=types.SimpleNamespace(w=W), sizes=[])

    def driver(state, batch):
        store.sizes.append(len(batch["y"]))  # what is not traced may be kept
        store.deep.w = store.deep.w - mean(batch)
        return state, {"w": store.deep.w.sum()}

    with pytest.raises(ad.DriverError, match="keeps a traced value"):
        planner(driver, W).begin(8)
    assert store.sizes == [8, 4]
