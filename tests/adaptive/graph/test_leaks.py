"""A driver that keeps a traced value, or whose hooks capture one, is refused when the program is built."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from tests.adaptive.drivers import FEATURES, planner

W = jnp.zeros(FEATURES)


def mean(batch):
    return comm.all_reduce(batch["y"].mean())


class Trainer:
    def __init__(self):
        self.w, self.log, self.inner = W, [], types.SimpleNamespace()

    def into_an_attribute(self, state, batch):
        self.w = self.w - mean(batch)
        return state, {}

    def into_a_list(self, state, batch):
        self.log.append(mean(batch))
        return state, {}

    def into_another_object(self, state, batch):
        self.inner.loss = mean(batch)
        return state, {}

    def __call__(self, state, batch):
        return self.into_an_attribute(state, batch)


@pytest.mark.parametrize(
    ("driver", "place"),
    [
        (Trainer().into_an_attribute, "w"),
        (functools.partial(Trainer().into_a_list), "log"),
        (Trainer().into_another_object, "inner"),
        (Trainer(), "w"),
        (jax.jit(Trainer().into_an_attribute), "w"),
    ],
    ids=["method", "partial", "deeper", "object", "jit"],
)
def test_a_driver_that_leaves_a_traced_value_in_an_object_is_refused(driver, place):
    with pytest.raises(ad.DriverError, match=rf"keeps a traced value in .*{place}(.|\n)*return {{\*\*state"):
        planner(driver, W).begin(8)


LAST = None
MODULE = types.SimpleNamespace()


def test_so_is_a_function_that_writes_to_globals_or_closure_variables():
    mine, last = [], None

    def to_a_list(state, batch):
        mine.append(mean(batch))
        return state, {}

    def to_a_variable(state, batch):
        nonlocal last
        last = mean(batch)
        return state, {}

    def to_a_global(state, batch):
        global LAST
        LAST = mean(batch)
        return state, {}

    def to_an_attribute_of_a_global(state, batch):
        MODULE.loss = mean(batch)
        return state, {}

    def to_a_helper(state, batch):
        to_a_list(state, batch)
        return state, {}

    for driver, place in {
        to_a_variable: "last, which",
        to_a_global: "the global LAST",
        to_an_attribute_of_a_global: "attribute 'loss' of the global MODULE",
        to_a_helper: "mine, which to_a_list",
    }.items():
        with pytest.raises(ad.DriverError, match=f"{driver.__name__}' keeps a traced value in {place}"):
            planner(driver, W).begin(8)
        global LAST
        LAST = None
        mine.clear()
        last = None
        MODULE.__dict__.clear()


def test_a_traced_value_that_the_next_trace_reads_is_refused_wherever_it_is_kept():
    store = types.SimpleNamespace(deep=types.SimpleNamespace(w=W))

    def driver(state, batch):
        store.deep.w = store.deep.w - mean(batch)
        return state, {"w": store.deep.w.sum()}

    with pytest.raises(ad.DriverError, match="keeps a traced value"):
        planner(driver, W).begin(8)


def test_a_driver_may_keep_what_is_not_traced():
    trainer = Trainer()

    def driver(state, batch):
        trainer.log.append(len(batch["y"]))
        trainer.inner.shapes = jax.tree.map(jnp.shape, batch)
        return state + mean(batch), {}

    planner(driver, W).begin(8)
    assert trainer.log


def test_so_is_a_callback_and_a_policy():
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
