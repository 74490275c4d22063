"""Operator states: what they may hold, and how they are numbered."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
from adaptive import operators
from tests.adaptive.drivers import Recorder, planned, pointed_at, traced


def count(label="count", init=None, update=lambda n: (n + 1, n)):
    return operators.operator_state(label, np.zeros(()) if init is None else init, update)


def test_a_op_state_may_hold_any_pytree():
    init = {"mean": np.zeros((2, 3)), "n": 0, "pair": (np.float32(1), [True])}

    def driver(state, batch):
        count("tree", init, lambda old: (jax.tree.map(lambda x: x, old), None))
        return state, {}

    (op_state,) = planned(driver, 0.0).op_states
    assert [(a.shape, str(a.dtype)) for a in op_state.init] == [
        ((2, 3), "float32"),
        ((), "int32"),
        ((), "float32"),
        ((), "bool"),
    ]


def test_op_states_of_one_label_are_numbered_in_the_drivers_order():
    def driver(state, batch):
        for label in ("a", "b", "a"):
            count(label)
        return state, {}

    assert [s.name for s in planned(driver, 0.0).op_states] == ["a/0", "b/0", "a/1"]


def test_a_op_state_in_a_jitted_helper_that_is_called_twice_is_two():
    helper = jax.jit(lambda x: x + count())

    def driver(state, batch):
        return state, {"a": helper(state), "b": helper(state)}

    assert [s.name for s in planned(driver, 0.0).op_states] == ["count/0", "count/1"]


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (lambda x: count(init=x), "initial state must be known before the first step"),
        (lambda x: count(update=lambda n: ((n, n), n)), "a state shaped like its initial one"),
        (lambda x: count(update=lambda n: (jnp.zeros(3), n)), "a state shaped like its initial one"),
        (lambda x: jax.vmap(lambda y: count(update=lambda n: (n + y, n)))(x), "mapped by jax.vmap"),
        (lambda x: jax.vmap(lambda y: operators.hook("h", Recorder(), (y,)))(x), "mapped by jax.vmap"),
    ],
)
def test_a_op_state_that_cannot_be_is_refused_with_its_line(call, wrong):
    def driver(state, batch):
        call(batch["y"])
        return state, {}

    with pytest.raises(ad.CollectiveError, match=wrong) as error:
        traced(driver, 0.0)
    assert pointed_at(error.value)
