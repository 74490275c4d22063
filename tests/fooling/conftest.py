"""Two worlds of three workers: in `make test` without devices, each of which has kernels of its own to compile."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

import collectives as comm
from adaptive.runtime.local_world import LocalWorld

WORLDS = {"local": lambda: LocalWorld(3), "devices": lambda: comm.DeviceWorld(jax.local_devices()[:3])}


@pytest.fixture(params=["local", pytest.param("devices", marks=pytest.mark.long)], scope="module")
def world(request) -> Iterator[LocalWorld | comm.DeviceWorld]:
    """A world of each kind under test, entered."""
    with WORLDS[request.param]() as world:
        yield world
