"""Memory that the processes of one host share: each writes to its own memory, and copies from that of the others.

If all ranks end when one is lost, these are MPI windows (MPI-3, chapter 11), which all ranks lock in shared mode as
long as they exist. If processes survive losses, or are not started by MPI, these are files (`shared_file.py`): Open MPI
does not guarantee one-sided communication after losses, and when a rank died while a window was created, others died
of a segmentation fault (5.0.11, two of six times). A file is created by one process alone, and exists until the last
process has closed it.
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
      own: this process's memory, as an array of bytes.
    """

    own: np.ndarray

    def has(self, rank: int) -> bool:
        """Return whether the memory of this rank can be copied from."""
        ...

    def copy(self, rank: int, start: int, room: np.ndarray) -> None:
        """Copy a rank's memory from byte `start` on into `room`, after all earlier reads."""
        ...

    def fence(self) -> None:
        """Order earlier writes before later writes, and earlier reads before later reads."""
        ...


class Windows:
    """An MPI window on the memory of the ranks of a host. Created collectively by all ranks of a communicator.

    Args:
      ranks: the ranks of this host, in the communicator.

    Attributes:
      name: unique name of the window, the same on all ranks.
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
    """Shared files: each process creates one, and opens those of the other processes of its host, if it can.

    Args:
      size: bytes of this process's file.
    """

    def __init__(self, size: int):
        self._file = SharedFile(size)
        self.own, self.address = self._file.memory, self._file.address
        self._memory: dict[int, np.ndarray] = {}

    def open(self, own: int, addresses: Mapping[int, SharedFileAddress]) -> None:
        """Open the files of other ranks, if possible. The files must exist until `close`."""
        self._memory[own] = self.own
        for rank, its in addresses.items():
            if its.path and rank != own:
                with suppress(OSError, ValueError):
                    self._memory[rank] = open_shared(its)

    def close(self) -> None:
        """Close this process's file once all others have opened it. Mappings stay valid."""
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
    """Order this thread's earlier memory accesses before its later ones. Releasing and acquiring a lock is a full
    barrier, also on processors that reorder memory accesses.
    """
    lock = Lock()
    lock.acquire()
    lock.release()
    lock.acquire()
