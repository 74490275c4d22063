"""What processes do together, one operation after another: each is completed by all that survive it, or by none.

An operation begins with the frame (`frame.py`). Where a process is lost in the middle of one, some of the others may
have completed it and some not. Those who have then hand its result on, so that nobody is ahead of the others in what
follows; so what an operation brought is kept until the next one is completed.

Behind some operations those who have completed them are not to be found in this communicator any more: they are in
another one, or at the end. Of others MPI may say that they are completed, while what came from one that has died is not
there. These are `agreed`: all learn whether it was completed on all, or else it counts for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np

from adaptive import WorkerError
from adaptive.extend import TransferPayload

from .disagreement import Intent

_AT_A_TIME = 1 << 30  # bytes of one message: MPI counts with 32 bits
_TAG = 7102

SHARE, BARRIER, CLOSE, FAILURE, REGROUP, HAND_OVER, MEETING, ON_MESH = (
    crc32(kind)
    for kind in (b"share", b"barrier", b"close", b"failure", b"regroup", b"hand over", b"meeting", b"on mesh")
)


class Operation:
    """One of them. `carry_out` raises what MPI raises; the attributes are what came of it.

    Args:
      about, more: see `World`.
      kind: a number of all else that must be equal on all processes, and `text` the words for it.
      failure: this process is in no collective, but has failed.

    Attributes:
      repeats: whether it can simply be done again among those who survive.
      agreed: whether it is completed on all, or on none, so that nothing of it is ever handed on.
      presences: where not all were about the same, what each rank was about; and `rank`, this process's among them.
    """

    repeats = True
    agreed = False

    def __init__(self, about: str, more: str, kind: int, text: str = "", failure: str = ""):
        self.about, self.more, self.kind, self.text, self.failure = about, more, kind, text, failure
        self.presences: list[Intent] | None = None
        self.rank = 0

    def carry_out(self, comm: Any) -> None:
        """Do it, among processes that are about the same."""

    def hand_on(self, comm: Any, root: int) -> None:
        """Have the result from rank `root`, which completed it, on the ranks of `comm`."""
        self.presences = comm.bcast(self.presences, root)
        if self.presences is None:
            self.send_result(comm, root)

    def send_result(self, comm: Any, root: int) -> None:
        """Broadcast what `carry_out` brought."""


class FinalOperation(Operation):
    """The last that processes do in this communicator."""

    agreed = True


class GatherBytes(Operation):
    """Every process's bytes, by rank: `result`."""

    agreed = True  # MPI may say that all is there, and what came from one that has died is not

    def __init__(self, value: bytes, about: str, more: str):
        super().__init__(about, more, SHARE, "values to share")
        self._value = value
        self.result: list[bytes] = []

    def carry_out(self, comm: Any) -> None:
        self.result = comm.allgather(self._value)


class Regroup(FinalOperation):
    """Of those who are together some go on without the others: `result` is their communicator.

    Args:
      stays: whether this process is one of them, as things are when it is carried out.
    """

    def __init__(self, mpi: Any, about: str, stays: Callable[[], bool]):
        super().__init__(about, "", REGROUP)
        self._mpi, self._stays = mpi, stays
        self.result: Any = None

    def carry_out(self, comm: Any) -> None:
        self.result = comm.Split(0 if self._stays() else self._mpi.UNDEFINED, comm.rank)
        if self.result != self._mpi.COMM_NULL:
            self.result.Set_errhandler(self._mpi.ERRORS_RETURN)


class StateTransfer(Operation):
    """What newcomers have to know: `result`, for them. Arrays go from those who know, of whom each tells some; all hear
    what is small.

    Args:
      make: makes it, of what is small, and of arrays; called on some who know.
      room: arrays to receive the others in, for one who does not.
      knows: whether this process knows already.
    """

    agreed = True  # else whoever has completed it would have to keep all that it has given or got

    def __init__(
        self, about: str, make: Callable[[], TransferPayload], room: Callable[[], list[np.ndarray]], *, knows: bool
    ):
        super().__init__(about, "", HAND_OVER)
        self._make, self._room, self._knows = make, room, knows
        self.result: TransferPayload | None = None

    def carry_out(self, comm: Any) -> None:
        knows = comm.allgather(self._knows)
        known, new = ([rank for rank, k in enumerate(knows) if k is wanted] for wanted in (True, False))
        if not known:
            raise WorkerError("all workers are lost, and with them the state of the run: newcomers alone are left.")
        tells = {rank: known[i % len(known)] for i, rank in enumerate(new)}
        first, told_by_me = known[0], [rank for rank in new if tells[rank] == comm.rank]
        small, arrays = self._make() if told_by_me or comm.rank == first else (None, [])
        small = comm.bcast(small, first)
        if not self._knows:
            arrays = self._room()
        sent = [piece for array in arrays for piece in pieces(array)]
        if self._knows:
            under_way = [comm.Isend(piece, rank, _TAG) for piece in sent for rank in told_by_me]
        else:
            under_way = [comm.Irecv(piece, tells[comm.rank], _TAG) for piece in sent]
        for request in under_way:
            request.Wait()
        self.result = None if self._knows else (small, arrays)


class StepOnMesh(Operation):
    """A whole step as one XLA program over the devices of all processes.

    Not repeated: the state of the step before is given up.

    Args:
      run: runs the program, and keeps its results elsewhere: the thread of the watch may be the last that refers to
        this operation, and arrays must not be freed there.
    """

    repeats = False
    agreed = True

    def __init__(self, about: str, more: str, run: Callable[[], object]):
        super().__init__(about, more, ON_MESH, "one program over the devices of all processes")
        self._run = run

    def carry_out(self, comm: Any) -> None:
        run, self._run = self._run, carried_out
        run()


class ReduceMessage(Operation):
    """An exchange: buffers in which parts are reduced, and the status as it arrived.

    Not repeated: the examples of a worker that is lost would be missing in it.

    Args:
      reduce: reduces all that did not travel in the frame, into `buffers`; returns the status.
      replicated: whether all processes come to the same: then who has completed it can hand it on.
    """

    repeats = False

    def __init__(
        self,
        *told: Any,
        buffers: Sequence[np.ndarray],
        status: np.ndarray,
        reduce: Callable[[], np.ndarray],
        replicated: bool = True,
    ):
        super().__init__(*told)
        self._buffers, self._reduce, self.agreed = buffers, reduce, not replicated
        self.arrived = status

    def surround(self, around: Callable[[Callable[[], np.ndarray]], np.ndarray], *, agreed: bool) -> None:
        """Have it reduced by what is given its `reduce`; and on all processes, or for none."""
        self._reduce, self.agreed = partial(around, self._reduce), self.agreed or agreed

    def carry_out(self, comm: Any) -> None:
        self.arrived = self._reduce()
        # The thread of the watch may be the last that knows this operation; arrays of JAX's are not let go there, as it
        # may be when the interpreter ends.
        self._reduce = carried_out

    def send_result(self, comm: Any, root: int) -> None:
        self.arrived = comm.bcast(self.arrived, root)
        for buffer in self._buffers:
            send_bytes(comm, buffer, root)


def carried_out() -> np.ndarray:
    """In place of what reduces a message that has been reduced, or is reduced without it."""
    raise AssertionError("a message is not carried out again")


def send_bytes(comm: Any, buffer: np.ndarray, root: int) -> None:
    """Broadcast an array's bytes into the same array of all."""
    for piece in pieces(buffer):
        comm.Bcast(piece, root)


def pieces(array: np.ndarray) -> list[np.ndarray]:
    """An array's bytes, at most so many in one piece as MPI can count. Views."""
    flat = array.reshape(-1).view(np.uint8)
    return [flat[start : start + _AT_A_TIME] for start in range(0, flat.size, _AT_A_TIME)]
