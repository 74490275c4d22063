"""Operations of processes that are threads: what each of them sends, and to whom."""

from __future__ import annotations

import numpy as np
import pytest

from adaptive import WorkerError
from adaptive.base.world import MembersChanged
from collectives.worlds.transport import operations
from collectives.worlds.transport.operations import (
    CLOSE,
    GatherBytes,
    Operation,
    RunOnce,
    StateTransfer,
    broadcast,
    pieces,
)
from tests.collectives.worlds.mpi_of_threads import Job, transport_of

ARRAYS = [np.arange(100.0).reshape(4, 25), np.float32([1.5]), np.zeros((0, 3)), np.arange(7, dtype=np.int8)]


@pytest.mark.parametrize("lacking", [(1,), (0, 2), (1, 2, 3, 4), (0, 1, 2, 3), (3, 4), ()])
def test_joining_processes_receive_the_state_from_those_that_have_it(lacking, monkeypatch):
    made = []
    monkeypatch.setattr(operations, "_MESSAGE_BYTES", 64)

    def use(comm):
        def make():
            made.append(comm.rank)
            return {"step": 7}, ARRAYS

        def room():
            return [np.full_like(array, 9) for array in ARRAYS]

        transfer = StateTransfer("a join", make, room, has_state=comm.rank not in lacking)
        transfer.carry_out(comm)
        return transfer.result

    results = Job(5).run(use)
    for rank, result in enumerate(results):
        assert (result is not None) is (rank in lacking)
        if result is not None:
            assert result[0] == {"step": 7}
            for got, array in zip(result[1], ARRAYS, strict=True):
                assert got.dtype == array.dtype
                np.testing.assert_array_equal(got, array)
    having = [rank for rank in range(5) if rank not in lacking]
    assert sorted(made) == having[: max(1, len(lacking))]  # each serves some, and the others copy nothing


def test_where_nobody_has_the_state_all_say_so():
    def use(comm):
        with pytest.raises(WorkerError, match="all workers that had the run's state are lost"):
            StateTransfer("a join", list, list, has_state=False).carry_out(comm)
        return True

    assert Job(2).run(use) == [True] * 2


@pytest.mark.parametrize("nbytes", [0, 1, 8, 9, 16, 17])
def test_arrays_are_sent_in_pieces_that_mpi_can_count(nbytes, monkeypatch):
    monkeypatch.setattr(operations, "_MESSAGE_BYTES", 8)
    array = np.arange(nbytes, dtype=np.int8)
    assert [piece.size for piece in pieces(array)] == [8] * (nbytes // 8) + [nbytes % 8] * (nbytes % 8 > 0)
    for piece in pieces(array):
        piece += 1
    assert array.tolist() == [*range(1, nbytes + 1)]

    def use(comm):
        own = np.full((nbytes, 2), comm.rank, np.int16)
        broadcast(comm, own, 1)
        return own.tolist()

    assert Job(2).run(use) == [[[1, 1]] * nbytes] * 2


@pytest.mark.parametrize(
    ("make", "calls"),
    [
        (lambda transport: Operation("it", "", CLOSE, is_final=True), 1),
        (lambda transport: RunOnce("it", "", 7, "", list), 1),
        (lambda transport: GatherBytes(b"", "it", ""), 2),
        (lambda transport: StateTransfer("it", lambda: (None, []), list, has_state=True), 3),
    ],
)
def test_an_operation_that_cannot_be_handed_on_is_completed_by_all_or_by_none(make, calls):
    """Process 2 is interrupted in its last call of MPI, and process 1 dies after it; process 0 notices nothing."""

    def use(comm):
        transport = transport_of(comm)
        operation = make(transport)
        try:
            transport.run(operation)
        except MembersChanged:
            assert isinstance(operation, RunOnce)  # whose data may be donated
        else:
            assert not isinstance(operation, RunOnce)
        return transport.losses

    first, second, third = Job(3, dies={1: calls}, fails={2: calls - 1}).run(use)
    assert (first, second) == (third, None)
    assert first == [([1], "it")]
