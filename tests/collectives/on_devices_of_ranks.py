"""Tests of sums from device to device between ranks; test_mpi.py runs them on the ranks of an mpirun.

Devices are CPUs: MPI reads and writes what JAX has all the same.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from collectives.worlds import on_accelerators
from collectives.worlds.on_accelerators import Reach
from tests.collectives.conftest import from_device_to_device

NO_STATUS = np.zeros(0, np.float32)
SHAPES = [(200_003,), (3,), (7, 100, 101), (50_000,)]  # the second one is small, and the last are of other kinds
TYPES = ["float32", "float32", "float32", "int32"]


def value(worker, shape, dtype):
    rng = np.random.default_rng(worker)
    return (rng.normal(size=shape) * 10.0 ** rng.integers(0, 9)).astype(dtype)


def exchange(world, shapes=SHAPES, dtypes=TYPES, ops=None):
    """Exchange them, and what came back for this process's first worker; and which parts went from device to device."""
    parts = [
        [jax.device_put(np.zeros(1, np.float32), device)]
        + [jax.device_put(value(worker, *kind), device) for kind in zip(shapes, dtypes, strict=True)]
        for worker, device in zip(world.workers, world.devices, strict=True)
    ]
    went, taken = [], world._on_devices.taken

    def looked_at():
        went.append(taken())
        return went[-1]

    world._on_devices.taken = looked_at
    try:
        rows, _ = world.exchange(parts, ["sum", *(ops or ["sum"] * len(shapes))], NO_STATUS)
    finally:
        del world._on_devices.taken
    return rows[0][1:], sorted(went[0])


def expected(world, shape, dtype):
    """Added up in the order of ranks."""
    return functools.reduce(np.add, [value(worker, shape, dtype) for worker in range(world.size)])


@pytest.fixture(scope="module")
def world():
    with from_device_to_device(jax.local_devices()[:1]) as world:
        yield world


def test_what_is_large_is_added_up_in_the_order_of_ranks(world):
    found, went = exchange(world)
    assert went == ([1, 3, 4] if world.size > 1 else [])
    for x, kind in zip(found, zip(SHAPES, TYPES, strict=True), strict=True):
        assert (x.shape, x.dtype) == kind
        np.testing.assert_array_equal(x, expected(world, *kind))


def test_extremes_and_part_0_go_through_the_host(world):
    found, went = exchange(world, [(200_003,)] * 2, ["float32"] * 2, ["max", "sum"])
    assert went == ([2] if world.size > 1 else [])
    np.testing.assert_array_equal(found[0], np.max([value(w, 200_003, "float32") for w in range(world.size)], 0))
    np.testing.assert_array_equal(found[1], expected(world, 200_003, "float32"))


def test_parts_travel_in_groups(world, monkeypatch):
    whole, _ = exchange(world)
    monkeypatch.setattr(on_accelerators, "GROUP_BYTES", 300_000)
    monkeypatch.setattr(on_accelerators, "_AT_A_TIME", 10_000)
    cut, went = exchange(world)
    assert went == ([1, 3, 4] if world.size > 1 else [])
    for x, y in zip(whole, cut, strict=True):
        np.testing.assert_array_equal(x, y)


def test_results_stay_as_they_were_whatever_comes(world):
    large = [SHAPES[0], SHAPES[2]], TYPES[:2]
    first, _ = exchange(world, *large)
    before = [np.array(x) for x in first]
    for _ in range(1 if world.size == 1 else 3):  # on one worker they are an inbox, of which there are two
        later, _ = exchange(world, *large)
        jax.jit(lambda xs: [2 * x for x in xs], donate_argnums=0)(later)
    for x, y in zip(first, before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_where_one_process_cannot_all_go_through_the_host():
    with from_device_to_device(jax.local_devices()[:1]) as world:
        if world.rank == world.processes - 1:
            world._on_devices._own = Reach("MPI is not CUDA-aware")
        for _ in range(2):
            found, went = exchange(world)
            assert went == []
            np.testing.assert_array_equal(found[0], expected(world, SHAPES[0], TYPES[0]))
        world._on_devices._device = FakeGPU()
        where = f"on rank {world.processes - 1} " if world.size > 1 else ""
        assert world.way(0) == (f"through the host: {where}MPI is not CUDA-aware" if world.size > 1 else "")
        world._on_devices._device = world.devices[0]


class FakeGPU:
    platform = "gpu"


def test_it_says_how_large_sums_go(world, monkeypatch):
    exchange(world)
    assert world.way(0) == ""
    monkeypatch.setattr(world._on_devices, "_device", FakeGPU())
    assert world.way(0) == ("from device to device" if world.size > 1 else "")
    assert world.way("another channel") == ""
