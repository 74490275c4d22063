"""Sums between the processes of one host, on CPUs, in shared memory.

gloo uses TCP even within a host: 3 MB between two processes of one core each took 4 ms, 1.6 ms of them processor time.
In shared memory nothing is sent. Each process has a row, and one more row is for results:

    1. each process copies its values into its row
    2. barrier (for the first load: the message's preamble)
    3. each process reduces its share of the elements over all rows, in the order of ranks, into the row of results
    4. barrier
    5. each process copies the results

A message larger than a row is sent as several *loads*. When a process writes its row again (1), all have passed barrier
4 and read the rows. When it writes results again (3), all have passed barrier 2 and read the results. Each element is
reduced by one process, so all processes have the same bits.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, closing, suppress
from functools import lru_cache
from typing import NamedTuple

import jax
import numpy as np

from adaptive.base.channel import Parts
from adaptive.base.reductions import Reduction
from collectives.worlds.shared_file import SharedFile, open_shared

from .receive_buffers import ALIGNMENT, Buffers, MessageLayout

ROW = 4 << 20  # bytes

# All of these keep NaNs, and integers overflow as in other worlds.
_REDUCE: dict[Reduction, np.ufunc] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class SharedMemorySum:
    """Sums over the processes of a host.

    Args:
      memory: a row for each process and one for results; shape=(processes + 1, ROW), uint8. See `shared_rows`.
      rank: this process's rank.
      barrier: returns when all processes have called it.
    """

    def __init__(self, memory: np.ndarray, rank: int, barrier: Callable[[], object]):
        self._rows, self._results = memory[:-1], memory[-1]
        self._rank, self._barrier = rank, barrier

    def buffers(self, layout: MessageLayout) -> SharedMemoryBuffers | None:
        """Return buffers for messages of one layout; None if numpy cannot reduce it as XLA does. Same on all ranks."""
        functions = _functions(layout)
        return None if functions is None else SharedMemoryBuffers(self, layout, functions)

    def write(self, load: Load, sent: Sequence[Sequence[np.ndarray]], functions: Sequence[np.ufunc]) -> None:
        """Write a load into this process's row: the values of its workers, reduced.

        Args:
          load: the pieces to write.
          sent: for each part, the flat values of each worker.
          functions: the reduction of each part.
        """
        for piece in load:
            room = _seen(self._rows[self._rank], piece, sent[piece.part][0].dtype)
            first, *others = (x[piece.start : piece.stop] for x in sent[piece.part])
            np.copyto(room, first)
            for x in others:
                functions[piece.part](room, x, out=room)

    def reduce(self, load: Load, received: Sequence[np.ndarray], functions: Sequence[np.ufunc]) -> None:
        """Reduce a load that all processes have written into `received`. Called by all processes."""
        rank, processes = self._rank, len(self._rows)
        for piece in load:
            dtype, function, n = received[piece.part].dtype, functions[piece.part], piece.stop - piece.start
            share = slice(n * rank // processes, n * (rank + 1) // processes)
            first, second, *others = (_seen(row, piece, dtype)[share] for row in self._rows)
            result = function(first, second, out=_seen(self._results, piece, dtype)[share])
            for x in others:
                function(result, x, out=result)
        self._barrier()
        for piece in load:
            part = received[piece.part]
            np.copyto(part[piece.start : piece.stop], _seen(self._results, piece, part.dtype))

    def wait_for_all(self) -> None:
        """Wait until all processes have called it."""
        self._barrier()


class SharedMemoryBuffers:
    """Receive buffers for messages of one layout, and the loads into which a message is divided."""

    def __init__(self, summation: SharedMemorySum, layout: MessageLayout, functions: Sequence[np.ufunc]):
        self.summation, self.functions, self.buffers = summation, functions, Buffers(layout)
        self.received = [buffer.reshape(-1) for buffer in self.buffers.buffers]
        self.loads = _loads(tuple((x.size, x.itemsize) for x in self.received))

    def message(self, parts: Sequence[Parts], devices: Sequence[jax.Device]) -> SharedMemoryMessage:
        """Return a message of these parts."""
        return SharedMemoryMessage(self, parts, devices)


class SharedMemoryMessage:
    """A message that is reduced in shared memory. Call `prepare` before the preamble, and `reduce` after it."""

    def __init__(self, room: SharedMemoryBuffers, parts: Sequence[Parts], devices: Sequence[jax.Device]):
        self._room, self._devices = room, devices
        self._sum, self._functions = room.summation, room.functions
        self._received, self._loads = room.received, room.loads
        self._sent = [[np.asarray(x).reshape(-1) for x in column] for column in zip(*parts, strict=True)]

    def prepare(self) -> None:
        """Write the first load. The preamble that follows is the barrier for it."""
        if self._loads:
            with np.errstate(all="ignore"):
                self._sum.write(self._loads[0], self._sent, self._functions)

    def reduce(self) -> list[list[jax.Array]]:
        """Return the reduced parts for each worker of this process."""
        with np.errstate(all="ignore"):
            for number, load in enumerate(self._loads):
                if number:
                    self._sum.write(load, self._sent, self._functions)
                    self._sum.wait_for_all()
                self._sum.reduce(load, self._received, self._functions)
        return self._room.buffers.arrays(self._devices)


class RowPiece(NamedTuple):
    """Some elements of a part, and their offset, in bytes, in a row."""

    part: int
    start: int
    stop: int
    at: int


Load = tuple[RowPiece, ...]


@lru_cache(maxsize=256)
def _loads(parts: tuple[tuple[int, int], ...]) -> tuple[Load, ...]:
    """Divide parts into loads of at most one row.

    Args:
      parts: number of elements and bytes per element of each part.
    """
    loads: list[list[RowPiece]] = [[]]
    at = 0
    for part, (elements, itemsize) in enumerate(parts):
        start = 0
        while start < elements:
            stop = min(elements, start + (ROW - at) // itemsize)
            if stop <= start:  # this row is full
                loads.append([])
                at = 0
                continue
            loads[-1].append(RowPiece(part, start, stop, at))
            at += -(-(stop - start) * itemsize // ALIGNMENT) * ALIGNMENT
            start = stop
    return tuple(tuple(load) for load in loads if load)


def _functions(layout: MessageLayout) -> tuple[np.ufunc, ...] | None:
    if not all(isinstance(op, str) and dtype.kind in "iufc" for _, dtype, op in layout):
        return None
    return tuple(_REDUCE[op] for _, _, op in layout)


def _seen(row: np.ndarray, piece: RowPiece, dtype: np.dtype) -> np.ndarray:
    """Return a view of a piece's elements in a row."""
    return row[piece.at : piece.at + (piece.stop - piece.start) * dtype.itemsize].view(dtype)


# --- the memory -------------------------------------------------------------------------------------------------------


def shared_rows(
    rank: int, hosts: Sequence[Hashable], gather: Callable[[bytes], list[bytes]], *, wanted: bool
) -> np.ndarray | None:
    """Return shared memory with a row per process and one more, in rank 0's file; None on all if one cannot use it.

    Args:
      rank: this process's rank.
      hosts: the host of each process; equal for processes that see each other's pids.
      gather: returns the bytes of all processes, by rank. Communicates.
      wanted: whether this process can use shared memory.
    """
    if len(hosts) == 1 or len(set(hosts)) > 1:
        return None
    size = (len(hosts) + 1) * ROW
    with ExitStack() as stack:
        own = stack.enter_context(closing(SharedFile(size))) if rank == 0 and wanted else None
        address = pickle.loads(gather(pickle.dumps(own and own.address))[0])
        memory = None
        if wanted and address is not None and address.path:
            with suppress(OSError, ValueError):
                memory = own.memory if own is not None else open_shared(address, write=True)
        if not all(gather(b"" if memory is None else b"it has it")):
            return None
    return memory.reshape(len(hosts) + 1, ROW) if memory is not None else None
