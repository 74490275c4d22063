"""`LocalWorld` is a world, and a context manager like those of `collectives`."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from adaptive.base.channel import SentMessage
from adaptive.base.values.current import current_world
from adaptive.program.arguments import world_of
from adaptive.runtime.local_world import LocalWorld


def test_the_stand_in_for_a_cluster_is_a_world():
    world = LocalWorld(3)
    assert (world.size, world.rank, world.processes, world.workers) == (3, 0, 1, range(3))
    assert len(world.devices) == 3
    assert world.all_gather_bytes(b"x") == [b"x"]
    assert world.barrier() is None
    parts = [[jnp.array([1.0 + w, 0.0]), jnp.array(w), jnp.array(-w)] for w in range(3)]
    results, status = world.exchange(SentMessage(parts, np.array([7.0])), ["sum", "max", "min"])
    assert [[np.asarray(x).tolist() for x in row] for row in results] == [[[6.0, 0.0], 2, -2]] * 3
    assert status.tolist() == [7.0]


def test_a_block_makes_it_the_current_world():
    with LocalWorld(3, workers=2) as outer:
        assert world_of(None) is outer
        with LocalWorld() as inner:
            assert world_of(None) is inner
        assert world_of(None) is outer
    assert current_world.get() is None


def test_a_block_that_raises_restores_the_world_before():
    world = LocalWorld(2)
    with pytest.raises(KeyError), world, world:
        raise KeyError("x")
    assert current_world.get() is None
