"""Which worlds the suite runs over: two in this process, or those that the ranks of an mpirun, or of `jax.distributed`,
were set to create.
"""

from __future__ import annotations

import os

import jax
import pytest

import collectives as comm

WORLDS = {
    "solo": comm.SoloWorld,
    "devices": comm.DeviceWorld,
    "mpi": comm.MPIWorld,
    "mpi-two-devices": lambda: comm.MPIWorld(devices=jax.local_devices()[:2]),
    "jax": lambda: comm.JaxWorld(jax.local_devices()[:1]),
    "jax-uneven": lambda: comm.JaxWorld(jax.local_devices()[: 1 + jax.process_index()]),
}
KINDS = os.environ.get("TESTS_WORLD", "solo devices").split()


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
