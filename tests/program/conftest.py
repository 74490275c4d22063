"""Which worlds the suite runs over: those of one process here, and those of several processes (tests/mpi)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import jax
import pytest

import collectives as comm
from adaptive.program import parts

WORLDS = {
    "solo": comm.SoloWorld,
    "devices": lambda: comm.DeviceWorld(jax.local_devices()[:3]),  # each has kernels of its own to compile
    "mpi": comm.MPIWorld,
    "mpi-two-devices": lambda: comm.MPIWorld(devices=jax.local_devices()[:2]),
    "jax": lambda: comm.JaxWorld(jax.local_devices()[:1]),
    "jax-two-devices": lambda: comm.JaxWorld(jax.local_devices()[:2]),
}
KINDS = os.environ.get("TESTS_WORLD", "solo devices").split()
# One worker alone does nothing that several do not: most of what it needs is tested without worlds, in tests/adaptive.
_WORLDS = [pytest.param(kind, marks=pytest.mark.long) if kind == "solo" else kind for kind in KINDS]


@pytest.fixture(params=_WORLDS, scope="module")
def world(request) -> Iterator[comm.SoloWorld | comm.DeviceWorld | comm.MPIWorld | comm.JaxWorld]:
    """A world of each kind under test, entered."""
    with WORLDS[request.param]() as world:
        yield world


@pytest.fixture(params=[kind for kind in KINDS if kind != "solo"], scope="module")
def workers(request) -> Iterator[comm.DeviceWorld | comm.MPIWorld | comm.JaxWorld]:
    """As `world`, of several workers."""
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


@pytest.fixture
def free_calls(monkeypatch):
    """For workers whose seconds are made up: as if microbatches cost nothing."""
    monkeypatch.setattr(parts, "CALL_OVERHEAD", 0.0)
