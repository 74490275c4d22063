"""Which worlds the suite runs over: two in this process, or those that the ranks of an mpirun, or of `jax.distributed`,
were set to create.
"""

from __future__ import annotations

import os
from unittest.mock import patch

import jax
import pytest

import collectives as comm
from collectives.worlds.reducing.cuda_aware import DEVICES, DeviceAccess

WORLDS = {
    "solo": comm.SoloWorld,
    "devices": comm.DeviceWorld,
    "mpi": comm.MPIWorld,
    "mpi-two-devices": lambda: comm.MPIWorld(devices=jax.local_devices()[:2]),
    "mpi-uneven": lambda: comm.MPIWorld(devices=jax.local_devices()[: 1 + _rank()]),
    "mpi-on-devices": lambda: from_device_to_device(jax.local_devices()[:1]),
    "mpi-on-devices-uneven": lambda: from_device_to_device(jax.local_devices()[: 1 + _rank()]),
    "jax": lambda: comm.JaxWorld(jax.local_devices()[:1]),
    "jax-by-xla": lambda: _by_xla(comm.JaxWorld(jax.local_devices()[:1])),
    "jax-uneven": lambda: comm.JaxWorld(jax.local_devices()[: 1 + jax.process_index()]),
}
KINDS = os.environ.get("TESTS_WORLD", "solo devices").split()


def _by_xla(world):
    """As on several hosts, which share no memory."""
    world.shared_memory = None
    return world


def from_device_to_device(devices) -> comm.MPIWorld:
    """A world for which MPI reads and writes what JAX has, as one that is CUDA-aware does on GPUs."""
    with patch("collectives.worlds.reducing.cuda_aware.reach", lambda *_: DeviceAccess("")):
        world = comm.MPIWorld(devices=devices)
    world.transport.cuda_sums.always = DEVICES
    return world


def _rank() -> int:
    with comm.MPIWorld() as world:
        return world.rank


@pytest.fixture(params=KINDS, scope="session")
def make_world(request):
    """Makes a new world of the kind under test."""
    return WORLDS[request.param]


@pytest.fixture(scope="module")
def world(make_world):
    """A world of the kind under test, entered."""
    with make_world() as world:
        yield world


@pytest.fixture
def double_precision():
    """JAX in double precision, for comparisons to the last digits."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
