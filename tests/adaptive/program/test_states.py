"""States of any kind."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.program.resumable import plain
from tests.problems import build, difference, make_data, make_params, mean_loss


class Everything(NamedTuple):
    """Leaves of all kinds that a state may have."""

    params: dict
    key: jax.Array
    steps: int
    done: jax.Array
    half: jax.Array
    none: None
    untouched: np.ndarray


def test_a_state_with_leaves_of_all_kinds():
    """It trains as the plain loop does, keeps its structure, and comes back as what it was."""
    state = Everything(
        make_params(),
        jax.random.key(7),
        0,
        jnp.array(False),
        jnp.ones(3, jnp.bfloat16),
        None,
        np.arange(4.0, dtype="f"),
    )

    def step(state, batch, reduce):
        loss, grads = reduce(jax.value_and_grad(mean_loss)(state.params, batch))
        key, sub = jax.random.split(state.key)
        noise = 1e-3 * jax.random.normal(sub, ())
        params = jax.tree.map(lambda p, g: p - 0.1 * g + noise, state.params, grads)
        half = (state.half * 1.5).astype(jnp.bfloat16)
        new = Everything(params, key, state.steps + 1, state.steps > 0, half, None, state.untouched)
        return new, {"loss": loss}

    data = make_data(48)
    with build(lambda s, b: step(s, b, comm.all_reduce), state, data, 48, world=LocalWorld(3)) as program:
        kept = program.state
        for _ in range(4):
            program.step()
        ours = program.state
    expected, alone = state, jax.jit(lambda s, b: step(s, b, lambda x: x)[0])
    for _ in range(4):
        expected = alone(expected, data)
    assert jax.tree.structure(ours) == jax.tree.structure(state)
    assert [leaf.dtype for leaf in jax.tree.leaves(ours)] == [jnp.asarray(x).dtype for x in jax.tree.leaves(state)]
    assert difference(plain(ours), plain(expected)) < 1e-5
    assert difference(plain(kept), plain(state)) == 0  # a copy, though its buffers were given away


def test_python_numbers_in_the_state_are_promoted_as_jit_does():
    """A learning rate of Python's leaves a model in half precision what it is; one that becomes an array does not."""

    def step(state, batch, reduce, decay):
        with jax.numpy_dtype_promotion("standard"):
            grad = reduce(jax.grad(lambda w: jnp.mean(batch["x"].astype(jnp.bfloat16) @ w))(state["w"]))
            return {"w": state["w"] - state["rate"] * grad, "rate": state["rate"] * decay, "steps": state["steps"] + 1}

    def driver(state, batch):
        return step(state, batch, comm.all_reduce, 0.5), {}

    state = {"w": jnp.ones(6, jnp.bfloat16), "rate": 0.25, "steps": 0}
    data = {"x": np.ones((48, 6), np.float32)}
    with build(driver, state, data, 48, world=LocalWorld(3)) as program:
        for _ in range(2):
            program.step()
        ours = program.state
        at_rate = program.evaluate(lambda s, b: (s["rate"] * b["x"].astype(jnp.bfloat16)).mean(), data)
        program.restore(program.checkpoint())
        program.step()
    expected = state
    for _ in range(2):
        expected = jax.jit(lambda s: step(s, data, lambda x: x, 0.5))(expected)
    assert difference(ours, expected) == 0
    kinds = [jax.tree.map(lambda a: (a.dtype, a.weak_type), tree) for tree in (ours, expected)]
    assert kinds[0] == kinds[1] == {"w": (jnp.bfloat16, False), "rate": (jnp.float32, True), "steps": (jnp.int32, True)}
    assert at_rate == 0.25 * 0.5**2
    with build(driver, ours, data, 48, world=LocalWorld(3)) as program:  # and what comes out can go in again
        program.step()

    def hardening(state, batch):
        return step(state, batch, comm.all_reduce, jnp.float32(0.5)), {}

    with pytest.raises(ad.DriverError, match=r"changes state\['w'\] from bfloat16\[6\] to float32\[6\]"):
        build(hardening, state, data, 48, world=LocalWorld(3))


def test_a_number_of_python_has_the_type_of_later_steps_in_the_first_one():
    """A weak type would have gone after one step, and with it what the driver computes in half precision."""

    def driver(state, batch):
        return state * np.float32(2), {"product": state * comm.all_reduce(batch["half"].mean())}

    with jax.numpy_dtype_promotion("standard"):
        data = {"half": np.ones(8, jnp.bfloat16)}
        with ad.Program(driver, 1.0, data, global_batch=4, world=LocalWorld(2)) as program:
            assert [program.step().metrics["product"].dtype for _ in range(2)] == [np.float32] * 2
