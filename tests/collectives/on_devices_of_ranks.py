"""Tests of sums from device to device between ranks; test_mpi.py runs them on the ranks of an mpirun.

Devices are CPUs: MPI reads and writes what JAX has all the same.
"""

from __future__ import annotations

import ctypes
import functools
from unittest.mock import patch

import jax
import numpy as np
import pytest

from collectives.worlds.reducing import cuda, cuda_aware
from collectives.worlds.reducing.autotune import MESSAGES, TRIALS
from collectives.worlds.reducing.cuda_aware import DEVICES, HOST, DeviceAccess
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
    went, end = [], world.transport.cuda_sums.end_message

    def looked_at():
        went.extend(sorted(world.transport.cuda_sums.results))
        end()

    with patch.object(world.transport.cuda_sums, "end_message", looked_at):
        rows, _ = world.exchange(parts, ["sum", *(ops or ["sum"] * len(shapes))], NO_STATUS)
    return rows[0][1:], went


def expected(world, shape, dtype):
    """Added up in the order of ranks."""
    return functools.reduce(np.add, [value(worker, shape, dtype) for worker in range(world.size)])


@pytest.fixture(scope="module")
def world():
    with from_device_to_device(jax.local_devices()[:1]) as world:
        yield world


def test_large_arrays_are_summed_in_the_order_of_ranks(world):
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
    monkeypatch.setattr(cuda_aware, "GROUP_BYTES", 300_000)
    monkeypatch.setattr(cuda_aware, "_AT_A_TIME", 10_000)
    cut, went = exchange(world)
    assert went == ([1, 3, 4] if world.size > 1 else [])
    for x, y in zip(whole, cut, strict=True):
        np.testing.assert_array_equal(x, y)


class OnTheHost(cuda.Shareable):
    """Memory beside JAX's, as CUDA's driver gives it."""

    def room(self, nbytes):
        if nbytes > self._nbytes:
            self._bytes, self._nbytes = np.empty(nbytes, np.uint8), nbytes
        return self._bytes.ctypes.data

    def copy(self, to, source, nbytes):
        ctypes.memmove(to, source, nbytes)


def test_memory_of_jax_that_other_processes_cannot_map_is_copied(world, monkeypatch):
    plain, _ = exchange(world)
    on_cpu = world.devices[0].platform == "cpu"
    monkeypatch.setattr(world.transport.cuda_sums, "_shareable", OnTheHost() if on_cpu else cuda.Shareable())
    for _ in range(2):
        found, went = exchange(world)
        assert went == ([1, 3, 4] if world.size > 1 else [])
        for x, y in zip(plain, found, strict=True):
            np.testing.assert_array_equal(x, y)
    assert (world.transport.cuda_sums._shareable._nbytes > 0) == (world.size > 1)


def test_results_are_unchanged_by_later_messages(world):
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
            world.transport.cuda_sums._own = DeviceAccess("MPI is not CUDA-aware")
        for _ in range(2):
            found, went = exchange(world)
            assert went == []
            np.testing.assert_array_equal(found[0], expected(world, SHAPES[0], TYPES[0]))
        world.transport.cuda_sums._remember(0)  # as it does for GPUs
        where = f"on rank {world.processes - 1} " if world.size > 1 else ""
        assert world.algorithm(0) == (f"through the host: {where}MPI is not CUDA-aware" if world.size > 1 else "")


@pytest.mark.parametrize("faster", [HOST, DEVICES])
def test_the_faster_algorithm_is_used(monkeypatch, faster):
    """By times of which one rank alone knows that they differ."""
    large = [SHAPES[0]], TYPES[:1]
    with from_device_to_device(jax.local_devices()[:1]) as world:
        if world.size == 1:
            return
        on_devices, slow = world.transport.cuda_sums, world.rank == world.processes - 1
        on_devices.always = None

        def clock():
            if on_devices._timed is None:
                return 0.0  # a message begins
            way = DEVICES if on_devices.results else HOST
            return on_devices._timed[1] + (3.0 if slow and way != faster else 2.0)

        monkeypatch.setattr(cuda_aware, "perf_counter", clock)
        went = [exchange(world, *large)[1] for _ in range(2 * TRIALS)]
        assert went == [[], [1]] * TRIALS
        on_devices._remember(0)
        assert world.algorithm(0) == "through the host and from device to device in turn, to measure which is faster"
        went = [exchange(world, *large)[1] for _ in range(MESSAGES + 1)]
        assert went == [[1] if faster == DEVICES else []] * (MESSAGES + 1)
        names = cuda_aware.NAMES
        assert world.algorithm(0).startswith(
            f"{names[faster]}: 2000 ms, {names[1 - faster]} 3000 ms; as measured up to"
        )


def test_a_deterministic_program_goes_through_the_host(world):
    with from_device_to_device(jax.local_devices()[:1]) as fixed:
        fixed.transport.cuda_sums.always = None
        fixed.deterministic = True
        went = [exchange(fixed)[1] for _ in range(3)]
        assert went == [[], [], []]
        fixed.transport.cuda_sums._remember(0)
        if fixed.size > 1:
            assert fixed.algorithm(0) == "through the host, not measured: in a deterministic program"


def test_the_algorithm_of_large_sums_is_described(world):
    exchange(world)
    world.transport.cuda_sums._remember(0)
    assert world.algorithm(0) == ("from device to device" if world.size > 1 else "")
    assert world.algorithm("another channel") == ""
