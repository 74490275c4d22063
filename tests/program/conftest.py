"""Which worlds the suite runs over: those of one process here, and those of several processes (tests/mpi)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import jax
import pytest

import collectives as comm
from adaptive.runtime.local_world import LocalWorld

WORLDS = {
    "local": lambda: LocalWorld(3),
    "devices": lambda: comm.DeviceWorld(jax.local_devices()[:3]),
    "mpi": comm.MPIWorld,
    "jax": lambda: comm.JaxWorld(jax.local_devices()[:1]),
}
# Each device has kernels of its own to compile: `make test` has those worlds in tests/contract.
KINDS = os.environ.get("TESTS_WORLD", "local devices").split()


@pytest.fixture(
    params=[pytest.param(k, marks=pytest.mark.long) if k == "devices" else k for k in KINDS], scope="module"
)
def world(request) -> Iterator[LocalWorld | comm.DeviceWorld | comm.MPIWorld | comm.JaxWorld]:
    """A world of each kind under test, entered."""
    with WORLDS[request.param]() as world:
        yield world


@pytest.fixture(params=["float32", "float64"])
def precision(request) -> Iterator[str]:
    """JAX in single and in double precision; for all threads, as a user sets it."""
    jax.config.update("jax_enable_x64", request.param == "float64")
    yield request.param
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def double_precision() -> Iterator[None]:
    """JAX in double precision, for comparisons to the last digits."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
