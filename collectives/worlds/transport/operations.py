"""Operations: collectives of all processes, performed one after another. The survivors of a loss all complete an
operation, or none does.

An operation begins with the preamble (`transport.py`). If a process is lost during the operation, some of the others
may have completed it and some not. Those that have completed it then send its result to the others. The result of an
operation is therefore kept until the next one is completed.

This is not possible for operations after which processes leave the communicator, nor for those where MPI may report
success although data of a dead process are missing. Such operations are `agreed`: the processes check whether all have
completed it, and otherwise it counts as failed on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from zlib import crc32

import numpy as np

from adaptive import WorkerError
from adaptive.base.world import TransferPayload

from .disagreement import Intent

NUMBERS = 128  # of a preamble: 1 kB, half a microsecond more than the smallest Allreduce, in shared memory
ROOM = NUMBERS - 4  # free for a message
_MESSAGE_BYTES = 1 << 30  # MPI counts with 32 bits
_TAG = 7102

SHARE, BARRIER, CLOSE, FAILURE, STATE_TRANSFER, RENDEZVOUS = (
    crc32(kind) for kind in (b"share", b"barrier", b"close", b"failure", b"state transfer", b"rendezvous")
)


class Operation:
    """Base class of operations. Subclasses override `carry_out`, which raises MPI's errors, and keep its result.

    Args:
      about, more: see `World`.
      kind: a checksum of everything else that must be equal on all processes.
      text: description of that.
      failure: a failure that this process reports instead of taking part in a collective; else "".
      is_final: whether the processes no longer use their communicator after it.

    Attributes:
      repeats: whether the survivors of a loss can simply repeat the operation.
      agreed: whether all processes check that all have completed it, so that its result is never handed on.
      numbers: what is summed in the preamble; float64, shape=(NUMBERS,).
      header: the bytes of `numbers`, which begin with those of the preamble itself.
      room: the part of `numbers` that is free for a message.
      intents: after a disagreement, what each process was about to do, by rank; else None.
      rank: this process's rank in `intents`.
    """

    repeats = True
    agreed = False

    def __init__(self, about: str, more: str, kind: int, text: str = "", failure: str = "", *, is_final: bool = False):
        self.agreed = self.agreed or is_final
        self.about, self.more, self.kind, self.text, self.failure = about, more, kind, text, failure
        self.numbers = np.zeros(NUMBERS)
        self.header, self.room = self.numbers.view(np.uint8).data, self.numbers[-ROOM:]
        self.intents: list[Intent] | None = None
        self.rank = 0

    def carry_out(self, comm: Any) -> None:
        """Carry out the operation after the preamble: all processes are in the same one."""

    def hand_on(self, comm: Any, root: int) -> None:
        """Broadcast the result from rank `root`, which has completed the operation, to all ranks of `comm`."""
        self.intents = comm.bcast(self.intents, root)
        if self.intents is None:
            self.send_result(comm, root)

    def send_result(self, comm: Any, root: int) -> None:
        """Broadcast the result of `carry_out` from rank `root`."""


class GatherBytes(Operation):
    """The operation that gathers every process's bytes, by rank, into `result`."""

    agreed = True  # MPI may report success although the data of a process that died have not arrived

    def __init__(self, value: bytes, about: str, more: str):
        super().__init__(about, more, SHARE, "values to share")
        self._value = value
        self.result: list[bytes] = []

    def carry_out(self, comm: Any) -> None:
        self.result = comm.allgather(self._value)


class StateTransfer(Operation):
    """The operation that sends a run's state to joining processes. It is their `result`; on others that is None.

    Small objects are broadcast. Arrays are sent in parallel: each process with the state serves some joining ones.

    Args:
      make: returns small objects and arrays; called on some processes with the state.
      room: returns arrays to receive into; called on joining processes.
      has_state: whether this process has the state.
    """

    agreed = True  # otherwise each process would have to keep all data that it has sent or received

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
        """Send the state to all processes that lack it. Raises WorkerError if none has it."""
        has_state = comm.allgather(self._has_state)
        senders, receivers = ([rank for rank, has in enumerate(has_state) if has is wanted] for wanted in (True, False))
        if not senders:
            raise WorkerError("all workers that had the run's state are lost; only joining ones remain.")
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


class RunOnce(Operation):
    """A function that all processes call together, and that communicates.

    Not repeated after a loss, because it may have consumed its data.

    `function` stores its results elsewhere: the watchdog's thread may hold the last reference to this operation, and
    must not free JAX arrays when the interpreter ends.
    """

    repeats = False
    agreed = True

    def __init__(self, about: str, more: str, kind: int, text: str, function: Callable[[], object]):
        super().__init__(about, more, kind, text)
        self._function: Callable[[], object] | None = function

    def carry_out(self, comm: Any) -> None:
        function, self._function = self._function, None
        assert function is not None, "it is called once"
        function()


def broadcast(comm: Any, buffer: np.ndarray, root: int) -> None:
    """Broadcast an array in place, from rank `root`."""
    for piece in pieces(buffer):
        comm.Bcast(piece, root)


def pieces(array: np.ndarray) -> list[np.ndarray]:
    """Return views of an array's bytes, each small enough for one MPI message."""
    flat = array.reshape(-1).view(np.uint8)
    return [flat[start : start + _MESSAGE_BYTES] for start in range(0, flat.size, _MESSAGE_BYTES)]
