"""Double precision in all contract tests, and a world of three devices."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

import collectives as comm


@pytest.fixture(autouse=True, scope="module")
def _double_precision() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="module")
def devices(_double_precision) -> Iterator[comm.DeviceWorld]:
    """A world of three workers on three devices of this process."""
    with comm.DeviceWorld(jax.local_devices()[:3]) as world:
        yield world
