"""What a hook knows about a worker is forgotten when another one takes its slot; the rest stays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive.control.slot_reset import reset_slots


def init(n):
    return {
        "rows": np.zeros((n, 2)),
        "columns": np.full((2, n), 7, np.int32),
        "device": jnp.zeros(n),
        "all": np.zeros(3),
        "steps": 0,
    }


def known(n):
    return {
        "rows": np.arange(2.0 * n).reshape(n, 2) + 1,
        "columns": np.arange(2 * n, dtype=np.int32).reshape(2, n),
        "device": jnp.arange(1.0, n + 1),
        "all": np.arange(3.0),
        "steps": 5,
    }


def test_only_the_entries_of_the_slots_are_reset():
    state, before = known(3), known(3)
    found = reset_slots(state, init, 3, [0, 2])  # the slots' axis of "all" would be as long
    expected = {
        "rows": [[0, 0], [3, 4], [0, 0]],
        "columns": [[7, 1, 7], [7, 4, 7]],
        "device": [0, 2, 0],
        "all": [0, 1, 2],
        "steps": 5,
    }
    assert {name: np.asarray(leaf).tolist() for name, leaf in found.items()} == expected
    assert [type(found[name]) for name in ("rows", "all", "steps")] == [np.ndarray, np.ndarray, int]
    assert isinstance(found["device"], jax.Array)
    assert found["columns"].dtype == np.int32
    assert jax.tree.all(jax.tree.map(np.array_equal, state, before)), "the state was changed in place"


@pytest.mark.parametrize(
    "init",
    [
        lambda n: {"pairs": np.zeros((n, n)), "steps": 0},
        lambda n: [0.0] * n,
        lambda n: np.zeros((1,) * n),
    ],
    ids=["pairs", "a list", "an axis each"],
)
def test_a_state_without_one_axis_of_workers_is_reset_as_a_whole(init):
    state = jax.tree.map(lambda leaf: leaf + 1, init(3))
    found = reset_slots(state, init, 3, [1])
    assert jax.tree.all(jax.tree.map(np.array_equal, found, init(3)))
