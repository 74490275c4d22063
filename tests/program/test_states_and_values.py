"""States of any kind; an evaluation that fails on one worker."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm

from .problems import FEATURES, build, descend, difference, make_data, make_params, mean_loss, same_everywhere

# --- states -----------------------------------------------------------------------------------------------------------


class Everything(NamedTuple):
    """Leaves of all kinds that a state may have."""

    params: dict
    key: jax.Array
    steps: int
    done: jax.Array
    half: jax.Array
    none: None
    untouched: np.ndarray


def test_a_state_with_leaves_of_all_kinds(world):
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
    with build(lambda s, b: step(s, b, comm.all_reduce), state, data, 48, world=world) as program:
        kept = program.state
        for _ in range(4):
            program.step()
        ours = program.state
    expected, plain = state, jax.jit(lambda s, b: step(s, b, lambda x: x)[0])
    for _ in range(4):
        expected = plain(expected, data)
    assert jax.tree.structure(ours) == jax.tree.structure(state)
    assert [leaf.dtype for leaf in jax.tree.leaves(ours)] == [jnp.asarray(x).dtype for x in jax.tree.leaves(state)]
    plain_leaves = jax.tree.map(_as_numbers, (ours, expected, kept, state))
    assert difference(plain_leaves[0], plain_leaves[1]) < 1e-5
    assert difference(plain_leaves[2], plain_leaves[3]) == 0  # a copy, though its buffers were given away
    assert same_everywhere(world, plain_leaves[0])


def test_python_numbers_in_the_state_are_promoted_as_jit_does(world):
    """A learning rate of Python's leaves a model in half precision what it is; one that becomes an array does not."""

    def step(state, batch, reduce, decay):
        with jax.numpy_dtype_promotion("standard"):
            grad = reduce(jax.grad(lambda w: jnp.mean(batch["x"].astype(jnp.bfloat16) @ w))(state["w"]))
            return {"w": state["w"] - state["rate"] * grad, "rate": state["rate"] * decay, "steps": state["steps"] + 1}

    def driver(state, batch):
        return step(state, batch, comm.all_reduce, 0.5), {}

    state = {"w": jnp.ones((FEATURES,), jnp.bfloat16), "rate": 0.25, "steps": 0}
    data = {"x": np.ones((48, FEATURES), np.float32)}
    with build(driver, state, data, 48, world=world) as program:
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
    with build(driver, ours, data, 48, world=world) as program:  # and what comes out can go in again
        program.step()

    def hardening(state, batch):
        return step(state, batch, comm.all_reduce, jnp.float32(0.5)), {}

    with pytest.raises(ad.DriverError, match=r"changes state\['w'\] from bfloat16\[6\] to float32\[6\]"):
        build(hardening, state, data, 48, world=world)


def _as_numbers(leaf):
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf, np.float64)


# --- evaluate ---------------------------------------------------------------------------------------------------------


class Torn:
    """A source of which the last worker's first example cannot be read."""

    def __init__(self, world):
        self.torn = 5 * (world.size - 1) or 7

    def __len__(self):
        return 50

    def __getitem__(self, index):
        if index == self.torn:
            raise OSError("torn page")
        return {"x": np.float32(index)}


def test_an_evaluation_that_fails_on_one_worker(world):
    source = Torn(world)
    # Several processes compare what they evaluate on, and all come upon it.
    mine = world.processes > 1 or source.torn // 5 % world.size in world.workers
    with build(descend, 0.0, make_data(), 16, world=world) as program:
        with pytest.raises(OSError if mine else ad.WorkerError, match="torn page" if mine else "failed in evaluate"):
            program.evaluate(lambda state, rows: rows["x"].mean(), source, batch=5)
        program.step()
