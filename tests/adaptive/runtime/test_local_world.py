"""`LocalWorld` as a context manager, like the worlds of `collectives`."""

from __future__ import annotations

import pytest

from adaptive.base.current import current_world
from adaptive.program.arguments import world_of
from adaptive.runtime.local_world import LocalWorld


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
