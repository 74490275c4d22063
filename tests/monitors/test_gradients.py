"""Norm and variance of one step's gradients."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive.base.values.current import enter, leave
from adaptive.runtime.local_world import LocalWorld

from .lockstep import Lockstep, graph, operators, reading


def test_the_norm_is_of_all_leaves_and_costs_nothing():
    grads = {"w": jnp.array([[3.0, 0.0]]), "b": jnp.array(4.0, jnp.bfloat16)}
    assert float(mon.gradient_norm(grads)) == 5.0
    assert operators(graph(mon.gradient_norm, grads)) == []


def variance(grads):
    return mon.gradient_variance(grads, comm.all_reduce(grads))


def test_the_variance_equals_a_calculation_by_hand():
    rows = [(jnp.array([1.0, 2.0]),), (jnp.array([3.0, -1.0]),), (jnp.array([0.0, 1.0]),)]
    found = Lockstep(variance).step(rows, [reading(examples=b) for b in (1, 2, 3)])
    assert float(found[0]) == pytest.approx(55 / 6, rel=1e-6)


def test_the_variance_keeps_no_state_and_sends_three_numbers():
    sent = operators(graph(lambda g: mon.gradient_variance(g, 1 * g), jnp.ones(5)))
    assert sent == ["source examples", "source microbatches", "all_reduce(op='sum') () () ()"]


def test_one_gradient_as_both_arguments_is_refused():
    own = jnp.ones(3)
    assert np.isnan(mon.gradient_variance(own, own))  # alone, a gradient is its own mean
    world = LocalWorld(2)
    token = enter(world)
    with pytest.raises(ad.CollectiveError, match=r"the same gradient twice"):
        mon.gradient_variance(own, own)
    leave(world, token)
