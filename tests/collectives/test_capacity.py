"""`world.capacity` is the number of worker slots, `world.size` the number of members now."""

import jax
import pytest

import collectives as comm
from adaptive.runtime.local_world import LocalWorld

COVERS = ("collectives/worlds/base.py",)


@pytest.mark.parametrize("make", [LocalWorld, lambda n: comm.DeviceWorld(jax.local_devices()[:n])])
def test_the_size_is_that_of_the_members_now(make):
    world = make(3)
    assert (world.size, world.capacity) == (3, 3)
    world.leave(1)
    assert (world.size, world.capacity, world.members) == (2, 3, (0, 2))
    world.join(1)
    assert (world.size, world.capacity) == (3, 3)


def test_those_in_reserve_are_not_counted():
    with comm.DeviceWorld(jax.local_devices()[:4], workers=2) as world:
        assert (world.size, world.capacity) == (2, 4)
