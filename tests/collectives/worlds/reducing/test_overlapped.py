"""Sums beside a computation: which pieces are under way, and what becomes of them after an error."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from collectives.worlds.reducing import overlapped
from collectives.worlds.reducing.overlapped import UNDER_WAY, overlapped_sum
from collectives.worlds.reducing.parts import FlatPart

N = 2 * UNDER_WAY + 1
MPI = SimpleNamespace(IN_PLACE="in place", Exception=ConnectionError)


class Request:
    """A piece that is complete at the third look, or when it is waited for."""

    def __init__(self, comm, source, target):
        self.comm, self.source, self.target, self.looks, self.waited = comm, source, target, 0, 0
        comm.under_way += 1

    def _complete(self):
        if self.comm.breaks:
            raise MPI.Exception
        self.target *= 2
        self.comm.under_way -= 1

    def Test(self):
        self.looks += 1
        if self.looks == 3:
            self._complete()
        return self.looks == 3

    def Wait(self):
        self.waited += 1
        self._complete()


class Comm:
    size = 2

    def __init__(self):
        self.requests, self.under_way, self.breaks, self.revoked = [], 0, False, False

    def Iallreduce(self, source, target, op):
        assert op == "sum"
        if not isinstance(source, str):
            target[:] = source
        self.requests.append(Request(self, source, target))
        assert self.under_way <= UNDER_WAY
        return self.requests[-1]

    def Revoke(self):
        self.revoked = True


@pytest.fixture
def comm(monkeypatch):
    monkeypatch.setattr(overlapped, "PIECE_BYTES", 8)
    monkeypatch.setattr(overlapped, "_left", [])
    monkeypatch.setattr(overlapped.time, "sleep", lambda seconds: None)
    return Comm()


def summed(comm, computing=lambda: True, *, in_place=False, survives=False):
    values = np.arange(float(N))
    part = FlatPart(3, None if in_place else values, values.copy() if in_place else np.zeros(N))
    yield from overlapped_sum(MPI, comm, part, "sum", computing, survives=survives)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("computes", [N, 0])
def test_pieces_arrive_in_order_while_some_are_under_way(comm, in_place, computes):
    """As long as the process computes it polls, and then it waits."""
    left = iter([True] * (2 * computes))
    for number, piece in enumerate(summed(comm, lambda: next(left, False), in_place=in_place)):
        assert (piece.number, piece.start, piece.target.tolist()) == (3, number, [2.0 * number])
        assert comm.under_way == min(UNDER_WAY - 1, N - number - 1)
    assert len(comm.requests) == N
    assert [request.waited for request in comm.requests] == [int(not computes)] * N
    assert [request.looks for request in comm.requests] == [3 if computes else 1] * N
    assert all(isinstance(request.source, str) is in_place for request in comm.requests)
    assert not overlapped._left


@pytest.mark.parametrize("survives", [False, True])
def test_after_a_loss_all_requests_are_over_or_their_memory_is_kept(comm, survives):
    arriving = summed(comm, survives=survives)
    next(arriving)
    comm.breaks = True
    with pytest.raises(MPI.Exception):
        list(arriving)
    assert comm.revoked is survives
    assert [request.waited for request in comm.requests[1:]] == [int(survives)] * UNDER_WAY
    assert [len(kept) for kept in overlapped._left] == ([] if survives else [UNDER_WAY])


def test_what_is_under_way_when_a_sum_is_given_up_is_kept(comm):
    arriving = summed(comm, survives=True)
    next(arriving)
    arriving.close()
    assert [len(kept) for kept in overlapped._left] == [UNDER_WAY - 1]
    assert not comm.revoked
