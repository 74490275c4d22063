"""Operations: what processes do together, one after another. Each is completed by all processes that survive it, or by
none.

An operation begins with the preamble (`preamble.py`). Where a process is lost in the middle of one, some of the others
may have completed it and some not. Those that have then hand on its result, so that no process is ahead of the others;
therefore the result of an operation is kept until the next one is completed.

After some operations, the processes that have completed them have left this communicator, for another one or for good.
Of others, MPI may report success although the data of a process that died have not arrived. These operations are
`agreed`: all processes learn whether all have completed it, and otherwise it counts for none.
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

_MESSAGE_BYTES = 1 << 30  # MPI counts with 32 bits
_TAG = 7102

SHARE, BARRIER, CLOSE, FAILURE, REGROUP, STATE_TRANSFER, RENDEZVOUS, ON_MESH = (
    crc32(kind)
    for kind in (b"share", b"barrier", b"close", b"failure", b"regroup", b"state transfer", b"rendezvous", b"on mesh")
)


class Operation:
    """An operation. Subclasses override `carry_out`, which raises the errors of MPI, and keep its result.

    Args:
      about, more: see `World`.
      kind: a number that encodes all else that must be equal on all processes; `text`: the words for it.
      failure: this process takes part in no collective, but reports this failure.

    Attributes:
      repeats: whether the survivors of a loss can simply repeat it.
      agreed: whether it is completed on all processes or on none, so that its result is never handed on.
      intents: where the processes were not in the same operation, what each was about to do, by rank; `rank`: this
        process's among them.
    """

    repeats = True
    agreed = False

    def __init__(self, about: str, more: str, kind: int, text: str = "", failure: str = ""):
        self.about, self.more, self.kind, self.text, self.failure = about, more, kind, text, failure
        self.intents: list[Intent] | None = None
        self.rank = 0

    def carry_out(self, comm: Any) -> None:
        """Do what follows the preamble, which all processes have found to be the same."""

    def hand_on(self, comm: Any, root: int) -> None:
        """Broadcast the result of rank `root`, which has completed the operation, to the ranks of `comm`."""
        self.intents = comm.bcast(self.intents, root)
        if self.intents is None:
            self.send_result(comm, root)

    def send_result(self, comm: Any, root: int) -> None:
        """Broadcast the result of `carry_out` from rank `root`."""


class FinalOperation(Operation):
    """The last operation of these processes in their communicator."""

    agreed = True


class GatherBytes(Operation):
    """Gathers every process's bytes, by rank, into `result`."""

    agreed = True  # MPI may report success although the data of a process that died have not arrived

    def __init__(self, value: bytes, about: str, more: str):
        super().__init__(about, more, SHARE, "values to share")
        self._value = value
        self.result: list[bytes] = []

    def carry_out(self, comm: Any) -> None:
        self.result = comm.allgather(self._value)


class Regroup(FinalOperation):
    """Makes a communicator, `result`, of those processes of the group that continue without the others.

    Args:
      stays: whether this process is one of them; called when the operation is carried out.
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
    """Transfers the state of a run to joining processes: their `result`; None on the others.

    Small objects are broadcast; each process that has the arrays sends them to some of the joining ones.

    Args:
      make: returns small objects and arrays; called on some processes that have the state.
      room: returns arrays to receive into; called on processes that do not.
      has_state: whether this process has the state.
    """

    agreed = True  # otherwise each process would have to keep all that it has sent or received

    def __init__(
        self,
        about: str,
        make: Callable[[], TransferPayload],
        room: Callable[[], list[np.ndarray]],
        *,
        has_state: bool,
    ):
        super().__init__(about, "", STATE_TRANSFER)
        self._make, self._room, self._has_state = make, room, has_state
        self.result: TransferPayload | None = None

    def carry_out(self, comm: Any) -> None:
        """Send the state to all processes that lack it.

        Raises:
          WorkerError: no process has it.
        """
        has_state = comm.allgather(self._has_state)
        senders, receivers = ([rank for rank, has in enumerate(has_state) if has is wanted] for wanted in (True, False))
        if not senders:
            raise WorkerError("all workers with the state of the run are lost; only joining ones remain.")
        sender_of = {rank: senders[i % len(senders)] for i, rank in enumerate(receivers)}
        first, own_receivers = senders[0], [rank for rank in receivers if sender_of[rank] == comm.rank]
        small, arrays = self._make() if own_receivers or comm.rank == first else (None, [])
        small = comm.bcast(small, first)
        if not self._has_state:
            arrays = self._room()
        sent = [piece for array in arrays for piece in pieces(array)]
        if self._has_state:
            under_way = [comm.Isend(piece, rank, _TAG) for piece in sent for rank in own_receivers]
        else:
            under_way = [comm.Irecv(piece, sender_of[comm.rank], _TAG) for piece in sent]
        for request in under_way:
            request.Wait()
        self.result = None if self._has_state else (small, arrays)


class StepOnMesh(Operation):
    """A whole step as one XLA program over the devices of all processes.

    Not repeated: the program donates the state of the step before.

    Args:
      run: runs the program, and keeps its results elsewhere: the watchdog's thread may hold the last reference to this
        operation, and must not free arrays.
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
    """The exchange of one message: reduces its parts into buffers, and its status into `arrived`.

    Not repeated: the examples of a lost worker would be missing in it.

    Args:
      header: `about`, `more`, `kind` and `text` of the operation.
      reduce: reduces all that did not travel in the preamble, into `buffers`; returns the status.
      replicated: whether all processes receive the same: then one that has completed it can hand it on.
    """

    repeats = False

    def __init__(
        self,
        *header: Any,
        buffers: Sequence[np.ndarray],
        status: np.ndarray,
        reduce: Callable[[], np.ndarray],
        replicated: bool = True,
    ):
        super().__init__(*header)
        self._buffers, self._reduce, self.agreed = buffers, reduce, not replicated
        self.arrived = status

    def wrap_reduce(self, wrapper: Callable[[Callable[[], np.ndarray]], np.ndarray], *, agreed: bool) -> None:
        """Replace `reduce` by `wrapper(reduce)`; `agreed`: from now on it is completed on all processes or on none."""
        self._reduce, self.agreed = partial(wrapper, self._reduce), self.agreed or agreed

    def carry_out(self, comm: Any) -> None:
        self.arrived = self._reduce()
        # The watchdog's thread may hold the last reference to this operation. It must not free JAX arrays, as it would
        # when the interpreter ends.
        self._reduce = carried_out

    def send_result(self, comm: Any, root: int) -> None:
        self.arrived = comm.bcast(self.arrived, root)
        for buffer in self._buffers:
            broadcast(comm, buffer, root)


def carried_out() -> np.ndarray:
    """Stand in for the `reduce` of a message that has been reduced, or is reduced by other means.

    Raises:
      AssertionError: always.
    """
    raise AssertionError("a message is not carried out again")


def broadcast(comm: Any, buffer: np.ndarray, root: int) -> None:
    """Broadcast an array in place, from rank `root`."""
    for piece in pieces(buffer):
        comm.Bcast(piece, root)


def pieces(array: np.ndarray) -> list[np.ndarray]:
    """Return views of an array's bytes, each small enough for one MPI message."""
    flat = array.reshape(-1).view(np.uint8)
    return [flat[start : start + _MESSAGE_BYTES] for start in range(0, flat.size, _MESSAGE_BYTES)]
