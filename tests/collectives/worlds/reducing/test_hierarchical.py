"""Sums by hosts, with MPI made of threads: what comes of them, whatever arrives when."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np
import pytest

from collectives.worlds.reducing import hierarchical
from collectives.worlds.reducing.hierarchical import HierarchicalSum
from collectives.worlds.reducing.parts import FlatPart, pieces
from tests.speed import limit

COVERS = ("collectives/worlds/reducing/inter_host.py", "collectives/worlds/reducing/parts.py")

SIZES = [1, 1000, 3, 257, 900]  # of parts


class Request:
    """Something that has to be waited for."""

    def __init__(self, wait):
        self.Wait = wait

    @staticmethod
    def Waitall(requests):
        for request in requests:
            request.Wait()


class MPI:
    IN_PLACE, UNDEFINED, ERRORS_RETURN = "in place", "undefined", "return"
    Exception = RuntimeError
    Request = Request


class Common:
    """What the threads of a communicator share."""

    def __init__(self, size):
        self.size, self.given, self.barrier = size, [None] * size, threading.Barrier(size, timeout=limit(10))
        self.mail: dict[tuple, SimpleQueue] = {}


class Comm:
    """A communicator of one thread. Data arrives late: at the wait."""

    def __init__(self, common, rank):
        self._common, self.rank, self.size = common, rank, common.size
        self.calls: list[str] = []

    def _exchanged(self, value):
        self._common.given[self.rank] = value
        self._common.barrier.wait()
        everyone = list(self._common.given)
        self._common.barrier.wait()
        return everyone

    def Split(self, color, key):
        everyone = self._exchanged((color, key))
        mine = [rank for rank, (its, _) in enumerate(everyone) if its == color]
        commons = self._exchanged(Common(len(mine)))
        return None if color == MPI.UNDEFINED else Comm(commons[mine[0]], mine.index(self.rank))

    def Set_errhandler(self, handler):
        assert handler == MPI.ERRORS_RETURN

    def Reduce(self, source, target):
        self.calls.append("Reduce")
        own = target if isinstance(source, str) else source
        everyone = self._exchanged(own.copy())
        assert (target is None) == (self.rank > 0)
        if target is not None:
            target[:] = sum(everyone)

    def Bcast(self, target):
        self.calls.append("Bcast")
        target[:] = self._exchanged(target.copy())[0]

    def Barrier(self):
        self._exchanged(None)

    def _box(self, source, target, tag):
        return self._common.mail.setdefault((source, target, tag), SimpleQueue())

    def Isend(self, array, to, tag):
        self._box(self.rank, to, tag).put((array, array.copy()))
        return Request(lambda: None)

    def Irecv(self, array, source, tag):
        array[:] = 99  # nobody reads it sooner
        box = self._box(source, self.rank, tag)

        def wait():
            sent, before = box.get(timeout=limit(10))
            assert np.array_equal(sent, before)  # nobody has written to it meanwhile
            array[:] = before

        return Request(wait)


def values(rank, number, dtype):
    return (100 * np.random.default_rng([rank, number]).normal(size=SIZES[number])).astype(dtype)


def sum_by_hosts(hosts, dtype=np.float32):
    """On each rank: sums of all parts, every other one in place; calls of MPI."""
    common = Common(len(hosts))

    def run(rank):
        way = HierarchicalSum(MPI, Comm(common, rank), hosts[rank], survives=False)
        own = [values(rank, number, dtype) for number in range(len(SIZES))]
        sums = [np.zeros_like(x) if number % 2 else x.copy() for number, x in enumerate(own)]
        way.sum(FlatPart(own[i] if i % 2 else None, sums[i]) for i in range(len(SIZES)))
        return sums, way._within.calls

    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(run, range(len(hosts))))


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(hierarchical, "PIECE_BYTES", 512)
    monkeypatch.setattr(hierarchical, "UNDER_WAY_BYTES", 1500)


@pytest.mark.parametrize(
    "dtype", [np.float32, *(pytest.param(dtype, marks=pytest.mark.long) for dtype in (np.int64, np.complex64))]
)
@pytest.mark.parametrize("hosts", [[0, 1, 0, 1], [2, 5, 5, 2, 7, 5], [0, 1, 1, 3, 4]])
def test_all_have_the_same_sums(small_pieces, hosts, dtype):
    results = sum_by_hosts(hosts, dtype)
    sums, _ = results[0]
    for number, got in enumerate(sums):
        expected = sum(values(rank, number, dtype) for rank in range(len(hosts)))
        np.testing.assert_allclose(got, expected, atol=1e-4)
    for others, _ in results[1:]:
        assert [x.tobytes() for x in others] == [x.tobytes() for x in sums]


def test_hosts_add_up_pieces_while_others_are_between_them(small_pieces):
    *_, calls = sum_by_hosts([0, 0, 1, 1])[0]
    assert calls.count("Reduce") == calls.count("Bcast") > 12
    ahead = [
        calls[: i + 1].count("Reduce") - calls[:i].count("Bcast") for i, call in enumerate(calls) if call == "Bcast"
    ]
    assert max(ahead) >= 6  # 1500 bytes to be added up between hosts, and 1500 that are on their way back
    assert set(calls[4:12]) == {"Reduce", "Bcast"} == set(calls[-12:])


def test_an_overflow_between_hosts_gives_no_warning():
    common = Common(3)

    def run(rank):
        target = np.array([3e38, np.inf, -np.inf], np.float32)
        HierarchicalSum(MPI, Comm(common, rank), rank, survives=False).sum([FlatPart(None, target)])
        return target.tolist()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(3))) == [[np.inf, np.inf, -np.inf]] * 3


@pytest.mark.parametrize(("size", "lengths"), [(8, [8]), (9, [4, 5]), (16, [8, 8]), (17, [5, 6, 6]), (0, [])])
def test_pieces_are_equally_large(size, lengths):
    whole = FlatPart(None, np.arange(size, dtype=np.float64))
    cut = list(pieces([whole], 8 * 8 + 5))
    assert [piece.target.size for piece in cut] == lengths
    assert np.array_equal(np.concatenate([whole.target[:0], *(piece.target for piece in cut)]), whole.target)
