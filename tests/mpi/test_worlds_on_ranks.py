"""What every world promises, on two ranks of which one has two devices; see tests/ranks.py."""

from __future__ import annotations

from functools import partial

import jax
import pytest

import collectives as comm
from tests.collectives.test_worlds import *  # noqa: F403 (its tests)

pytestmark = [pytest.mark.ranks, pytest.mark.on_ranks(2)]


@pytest.fixture(scope="module")
def make_world():
    with comm.MPIWorld() as world:
        return partial(comm.MPIWorld, devices=jax.local_devices()[: 1 + world.rank])


@pytest.fixture(scope="module")
def world(make_world):
    with make_world() as world:
        yield world
