"""The board of a world of MPI processes: memory of each, which the others read when they like (MPI-3, chapter 11).

Each worker has a place in a window of its process, in which it writes, and from which others get. The window is locked
by all as long as it lives, and shared; nobody ever locks it for himself alone, so a process that is slow, stopped or
dead is in nobody's way.

A place is a header and two *slots*, which are written in turn:

    begun   how many publications have been begun        written before the slot
    done    how many are done                            written behind it: slot `done % 2` is the latest
    rounds  of what is in the slots

A reader takes the header, the latest slot, and the header again: unless two more publications have been begun meanwhile
the slot was not written while it was read. If they have, what it holds may be torn, and the reader begins anew; a few
times, and then goes without. Each of the three is complete before the next one begins (`Flush`), and the writer's
stores are kept in order by fences (`Sync`).

On one host a `Get` is a copy out of shared memory. Between hosts Open MPI sends the owner a message, which it answers
when it is in MPI, and one that computes is not. So there each process has a thread that looks in every millisecond, and
a reader does not wait for an answer for longer than a moment: whoever owes one is not asked again until it has come.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from typing import Any
from zlib import crc32

import numpy as np

from adaptive.extend import Vectors, at_the_end

from .operations import Operation, pieces
from .processes import Process, Together

_HEADER = 64  # bytes; four numbers, in a line of the cache of their own
_LINE = 64
_TRIES = 3
_LOOKS_IN = 0.001  # seconds between two looks of the thread
_PATIENCE = 0.25  # seconds that a reader waits for an answer from another host,
_SLOWEST = 20e6  # and longer for more bytes: by so many a second

_windows_change = threading.Lock()  # held while one is made or freed: then the thread does not look in

_KIND = crc32(b"board")
_COMPONENT = "OMPI_MCA_osc"


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Before MPI is loaded, and if all ranks are on one host: leave out what is for networks; where there is none it
    prints that it has failed, once per rank.
    """
    ranks = environ.get("OMPI_COMM_WORLD_SIZE")
    if ranks is not None and ranks == environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"):
        environ.setdefault(_COMPONENT, "^ucx")


def why_none(mpi: Any, everyone: Sequence[Process], *, survives: bool, spawns: bool) -> str:
    """Why these processes can have no board: "" where they can."""
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return (
            "MPI was initialised for one thread at a time, and kernels publish from threads of XLA's. Without an "
            "mpi4py.rc.thread_level of your own, mpi4py asks for MPI.THREAD_MULTIPLE"
        )
    if spawns:
        return (
            "processes may be spawned into it (max_workers=). Start as many as there may be, and hold some in reserve"
        )
    if survives and len({process.host for process in everyone}) > 1:
        return (
            "it is on several hosts and goes on when processes are lost; a reader of memory of a host that is gone "
            "would wait for ever. Start it without --with-ft ulfm"
        )
    return ""


class MakeBoard(Operation):
    """Make a board, for those who are together: `result`.

    Args:
      own: the workers of this process.
      nbytes: of the vectors that each worker publishes.
      together: those who make it.
      outdated: a board whose place it takes.
    """

    agreed = True

    def __init__(
        self,
        mpi: Any,
        about: str,
        nbytes: Sequence[int],
        own: range,
        together: Callable[[], Together],
        outdated: WindowBoard | None,
    ):
        super().__init__(about, "", crc32(repr(tuple(nbytes)).encode(), _KIND), f"a board of {tuple(nbytes)} bytes")
        self._mpi, self._nbytes, self._own, self._together, self._outdated = mpi, nbytes, own, together, outdated
        self.result: Any = None

    def carry_out(self, comm: Any) -> None:
        together = self._together()
        if self._outdated is not None:
            self._outdated.free_among(together)
        with _windows_change:
            self.result = WindowBoard(self._mpi, comm, together, self._own, self._nbytes)


class WindowBoard:
    """A place for each worker, in memory of its process. Made by all at once; for the rest see `Board`."""

    def __init__(self, mpi: Any, comm: Any, together: Together, own: range, nbytes: Sequence[int]):
        self._mpi, self._everyone, self._own, self._nbytes = mpi, together.everyone, own, tuple(nbytes)
        self._where = {seat: (rank, i) for rank, p in enumerate(self._everyone) for i, seat in enumerate(p.seats)}
        lines = [-(-n // _LINE) * _LINE for n in nbytes]
        self._starts = np.cumsum([0, *lines]).tolist()
        self._slot = self._starts[-1]
        self._place = _HEADER + 2 * self._slot
        self._window: Any = mpi.Win.Allocate(len(own) * self._place, 1, mpi.INFO_NULL, comm)
        self._window.Set_errhandler(mpi.ERRORS_RETURN)
        self._window.Lock_all(mpi.MODE_NOCHECK)
        memory = np.frombuffer(self._window.tomemory(), np.uint8)
        memory[:] = 0
        self._window.Sync()
        comm.Barrier()
        self._memory = [memory[i * self._place : (i + 1) * self._place] for i in range(len(own))]
        self._headers = [place[:_HEADER].view(np.int64) for place in self._memory]
        host = self._everyone[comm.rank].host
        away = [rank for rank, process in enumerate(self._everyone) if process.host != host]
        self._readers = [_Reader(mpi, self._window, self._slot, frozenset(away)) for _ in own]
        self._thread = None if together.one_host else LookingIn(mpi)
        self.torn = 0  # copies that were begun anew: for tests

    def publish(self, worker: int, round: int, vectors: Vectors) -> None:
        """Write the slot that nobody is sent to yet, and then send them there: the protocol of `Board`."""
        place, header = self._memory[self._own.index(worker)], self._headers[self._own.index(worker)]
        number = int(header[1]) + 1
        slot = place[_HEADER + number % 2 * self._slot :]
        header[0] = number
        self._window.Sync()
        header[2 + number % 2] = round
        for start, vector in zip(self._starts, vectors, strict=False):
            slot[start : start + vector.nbytes] = vector.reshape(-1).view(np.uint8)
        self._window.Sync()
        header[1] = number
        self._window.Sync()

    def look(self, worker: int, reader: int, round: int) -> Vectors | None:
        """A whole copy, or none: the protocol of `Board`."""
        rank, i = self._where[worker]
        start, read = i * self._place, self._readers[self._own.index(reader)]
        for _ in range(_TRIES):
            header = read.header(rank, start)
            if header is None or not header[1] or header[2 + header[1] % 2] != round:
                return None
            slot = read.slot(rank, start + _HEADER + header[1] % 2 * self._slot)
            after = None if slot is None else read.header(rank, start)
            if slot is None or after is None:
                return None
            if after[0] < header[1] + 2:
                return [slot[s : s + n] for s, n in zip(self._starts, self._nbytes, strict=False)]
            self.torn += 1
        return None

    def free_among(self, together: Together) -> None:
        """Give the memory back, if all who made it are here; they call this at the same point. Else it stays until
        they end: freeing waits for all.
        """
        self.stop()
        if self._window is not None and set(self._everyone) <= set(together.everyone):
            window, self._window = self._window, None
            self._memory, self._headers = [], []
            with _windows_change:
                window.Unlock_all()
                window.Free()

    def stop(self) -> None:
        """End its thread."""
        if self._thread is not None:
            self._thread.stop()


class _Reader:
    """Copies of what others have published, for one worker.

    Args:
      slot: bytes of one.
      away: ranks on other hosts.
    """

    def __init__(self, mpi: Any, window: Any, slot: int, away: frozenset[int]):
        self._mpi, self._window, self._away = mpi, window, away
        self._header, self._slot = np.zeros(4, np.int64), np.zeros(slot, np.uint8)
        self._owing: dict[int, Any] = {}  # what ranks have been asked for, and have not answered

    def header(self, rank: int, start: int) -> list[int] | None:
        """The four numbers; `None` if they cannot be had now."""
        if not self._get(self._header, rank, start):
            self._header = np.zeros(4, np.int64)
            return None
        return self._header.tolist()

    def slot(self, rank: int, start: int) -> np.ndarray | None:
        """A copy, perhaps torn, which is written again by the next call; `None` if it cannot be had now."""
        if not self._get(self._slot, rank, start):
            self._slot = np.zeros(self._slot.size, np.uint8)
            return None
        return self._slot

    def _get(self, buffer: np.ndarray, rank: int, start: int) -> bool:
        """Whether a copy is there. If not, the buffer is left to what may still come."""
        byte = self._mpi.BYTE
        try:
            for piece in pieces(buffer):
                target = (start, piece.size, byte)
                if rank not in self._away:
                    self._window.Get([piece, byte], rank, target)
                    self._window.Flush(rank)
                elif not self._asked(piece, rank, target):
                    return False
                start += piece.size
        except self._mpi.Exception:  # it is gone: who meets at the end of the round will hear of it
            return False
        return True

    def _asked(self, piece: np.ndarray, rank: int, target: tuple[int, int, Any]) -> bool:
        """As above, from another host, unless no answer comes."""
        if rank in self._owing:
            request, _ = self._owing[rank]
            if not request.Test():
                return False
            del self._owing[rank]
        request = self._window.Rget([piece, self._mpi.BYTE], rank, target)
        until = time.monotonic() + _PATIENCE + piece.size / _SLOWEST
        while not request.Test():
            if time.monotonic() > until:
                self._owing[rank] = request, piece
                return False
            time.sleep(0)
        return True


class LookingIn:
    """A thread that is in MPI now and then, so that readers on other hosts are answered while this process computes."""

    def __init__(self, mpi: Any):
        self._mpi, self._over = mpi, threading.Event()
        self._thread = threading.Thread(target=self._look_in, name="adaptive-board", daemon=True)
        self._thread.start()
        self._forget = at_the_end(self.stop)

    def _look_in(self) -> None:
        with suppress(self._mpi.Exception):
            while not self._over.wait(_LOOKS_IN):
                with _windows_change:
                    self._mpi.COMM_SELF.Iprobe()

    def stop(self) -> None:
        """End it, and wait until it has ended: MPI must not be finalised meanwhile."""
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._forget()
