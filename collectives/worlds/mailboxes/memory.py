"""Memory of processes of one host, to which each writes its own, and from which the others copy.

Among ranks that end together these are windows of MPI (MPI-3, chapter 11), locked by all as long as they exist, in
shared mode: no rank ever locks one exclusively. Among processes that continue when one is lost, or that MPI has not
started, they are files (`shared_file.py`). Open MPI does not claim that its one-sided communication works with losses:
where a rank died while a window was made, others died of a segmentation fault (5.0.11, two of six times). A file is
made by one process alone, and exists until the last one has closed it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any, Protocol

import numpy as np

from collectives.worlds.shared_file import SharedFile, SharedFileAddress, open_shared
from collectives.worlds.transport.operations import pieces


class Memory(Protocol):
    """The memory of this process and of some others.

    Attributes:
      own: this process's, in bytes.
    """

    own: np.ndarray

    def has(self, rank: int) -> bool:
        """Return whether the memory of this rank can be copied from."""
        ...

    def copy(self, rank: int, start: int, room: np.ndarray) -> None:
        """Fill `room` from there, after what was read before."""
        ...

    def fence(self) -> None:
        """Order what was written before ahead of what will be written, and so for reads."""
        ...


class Windows:
    """Memory that MPI shares among the ranks of a host. Made by all ranks of a communicator at once.

    Args:
      ranks: of this host, in the communicator.

    Attributes:
      name: the same for all, and different each time.
    """

    def __init__(self, mpi: Any, comm: Any, ranks: Sequence[int], size: int):
        self._byte = mpi.BYTE
        self._there = {rank: i for i, rank in enumerate(ranks)}
        self.name = comm.bcast(secrets.token_bytes(8))
        self._comm = comm.Split(ranks[0], comm.rank)
        self._window: Any = mpi.Win.Allocate(size, 1, mpi.INFO_NULL, self._comm)
        self._window.Set_errhandler(mpi.ERRORS_RETURN)
        self._window.Lock_all(mpi.MODE_NOCHECK)
        self.own = np.frombuffer(self._window.tomemory(), np.uint8)
        self.own[:] = 0
        self._window.Sync()
        comm.Barrier()

    def has(self, rank: int) -> bool:
        """Return whether this rank is on this host."""
        return rank in self._there

    def copy(self, rank: int, start: int, room: np.ndarray) -> None:
        """Copy by MPI_Get, and wait for it."""
        for piece in pieces(room):
            self._window.Get([piece, self._byte], self._there[rank], (start, piece.size, self._byte))
            self._window.Flush(self._there[rank])
            start += piece.size

    def fence(self) -> None:
        """Order reads and writes by MPI_Win_sync."""
        self._window.Sync()

    def free(self) -> None:
        """Free the window; collective. Calling it again does nothing."""
        window, self._window = self._window, None
        if window is not None:
            self.own = np.empty(0, np.uint8)
            window.Unlock_all()
            window.Free()
            self._comm.Free()


class Files:
    """Memory that each process makes for itself, and the others of its host open. Where that is not possible, only a
    process's own.
    """

    def __init__(self, size: int):
        self._file = SharedFile(size)
        self.own, self.told = self._file.memory, self._file.told
        self._memory: dict[int, np.ndarray] = {}

    def open(self, own: int, told: Mapping[int, SharedFileAddress]) -> None:
        """Open those of other ranks, as far as that is possible; they must exist until `close`."""
        self._memory[own] = self.own
        for rank, its in told.items():
            if its.path and rank != own:
                with suppress(OSError, ValueError):
                    self._memory[rank] = open_shared(its)

    def close(self) -> None:
        """Close this process's file, which no process opens any more. Mappings stay."""
        self._file.close()

    def has(self, rank: int) -> bool:
        """Return whether the memory of this rank could be opened."""
        return rank in self._memory

    def copy(self, rank: int, start: int, room: np.ndarray) -> None:
        """Copy between two fences."""
        fence()
        room[:] = self._memory[rank][start : start + room.size]
        fence()

    def fence(self) -> None:
        """Order reads and writes: see `fence`."""
        fence()


def fence() -> None:
    """Order what this thread reads and writes before ahead of what it does after: acquiring a lock that was released is
    a full barrier on processors that reorder memory accesses.
    """
    lock = Lock()
    lock.acquire()
    lock.release()
    lock.acquire()
