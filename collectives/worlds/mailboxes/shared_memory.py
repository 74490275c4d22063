"""Memory in which workers publish, and from which the other processes of the host copy at any time: a seqlock.

The memory is an anonymous file, which others open through `/proc`. Different hosts may have the same name, and in
another pid namespace the same path is another file. So the file begins with a random token, which is sent with the path
and compared.

A worker's place is a header and two *slots*, which are written alternately:

    begun   number of publications begun        written before the slot
    done    number of publications done         written after the slot; slot `done % 2` is the latest
    rounds  round of each slot's content

A reader copies the latest slot, and then looks at the header again. If no two more publications have begun meanwhile,
the slot was not written while it was read. Otherwise the copy may be torn, and the reader tries again, a few times.
Fences keep reads and writes in this order; no lock is held.
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import numpy as np

from adaptive.base.mailbox import Vectors

_LINE = 64  # bytes of a cache line, to which the token, headers and vectors are aligned
_TRIES = 3


class FileAddress(NamedTuple):
    """The path of a process's file ("" if there is none), and its token."""

    path: str
    token: bytes


class SharedFile:
    """A shared file of this process. If it cannot be created, private memory instead.

    Args:
      size: bytes of the memory.

    Attributes:
      memory: the memory, zeros at first; stays valid when the file is closed.
      address: the file's address, to send to other processes.
    """

    def __init__(self, size: int):
        self._file: int | None = None
        token = secrets.token_bytes(_LINE)
        try:
            self._file = os.memfd_create("adaptive")
            os.posix_fallocate(self._file, 0, _LINE + size)  # fails now if memory is short, instead of by SIGBUS later
            whole = np.frombuffer(mmap.mmap(self._file, _LINE + size), np.uint8)
        except (AttributeError, OSError):
            self.close()
            whole = np.zeros(_LINE + size, np.uint8)
        whole[:_LINE] = np.frombuffer(token, np.uint8)
        self.memory = whole[_LINE:]
        self.address = FileAddress("" if self._file is None else f"/proc/{os.getpid()}/fd/{self._file}", token)

    def close(self) -> None:
        """Close the file, so that no further process can open it. Existing mappings stay valid."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def open_shared(address: FileAddress) -> np.ndarray:
    """Return the memory of another process of this host, read-only.

    Raises:
      OSError: it cannot be opened.
      ValueError: the path is not a shared file, or another one.
    """
    file = os.open(address.path, os.O_RDONLY | os.O_NONBLOCK)  # it may be a pipe
    try:
        state = os.fstat(file)
        if not stat.S_ISREG(state.st_mode) or state.st_size < _LINE:
            raise ValueError(f"{address.path} is not a shared file")
        whole = np.frombuffer(mmap.mmap(file, state.st_size, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(file)
    if whole[:_LINE].tobytes() != address.token:
        raise ValueError(f"{address.path} is another file")
    return whole[_LINE:]


class SlotLayout:
    """The layout of a process's memory: a place per worker, each with a header and two slots.

    Args:
      nbytes: sizes of the vectors that each worker publishes.

    Attributes:
      slot: bytes of one publication.
      place: bytes of one worker's place.
    """

    def __init__(self, nbytes: Sequence[int]):
        self._nbytes = tuple(nbytes)
        lines = [-(-n // _LINE) * _LINE for n in nbytes]
        self._starts: list[int] = np.cumsum([0, *lines]).tolist()
        self.slot = self._starts[-1]
        self.place = _LINE + 2 * self.slot

    def vectors(self, slot: np.ndarray) -> Vectors:
        """Return the published vectors, as views of a copy of their slot."""
        return [slot[start : start + n] for start, n in zip(self._starts, self._nbytes, strict=False)]

    def write(self, memory: np.ndarray, i: int, round: int, vectors: Vectors) -> None:
        """Publish vectors of this process's worker `i`: write the older slot, and then mark it as the latest."""
        header, slots = self._place(memory, i)
        number = int(header[1]) + 1
        slot = slots[number % 2]
        header[0] = number
        _fence()
        header[2 + number % 2] = round
        for start, vector in zip(self._starts, vectors, strict=False):
            slot[start : start + vector.nbytes] = vector.reshape(-1).view(np.uint8)
        _fence()
        header[1] = number
        _fence()

    def copy_latest(self, memory: np.ndarray, i: int, round: int, room: np.ndarray) -> bool:
        """Copy the latest slot of a process's worker `i` consistently into `room`. Returns False if there is no
        publication of this round, or every attempt may be torn.
        """
        header, slots = self._place(memory, i)
        for _ in range(_TRIES):
            number = int(header[1])
            if not number or header[2 + number % 2] != round:
                return False
            _fence()
            room[:] = slots[number % 2]
            _fence()
            if header[0] < number + 2:
                return True
        return False

    def _place(self, memory: np.ndarray, i: int) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """Return the header and the slots of worker `i`."""
        place = memory[i * self.place : (i + 1) * self.place]
        return place[:_LINE].view(np.int64), (place[_LINE : _LINE + self.slot], place[_LINE + self.slot :])


def _fence() -> None:
    """Order this thread's earlier memory accesses before its later ones. Releasing and acquiring a lock is a full
    barrier, also on processors that reorder memory accesses.
    """
    lock = Lock()
    lock.acquire()
    lock.release()
    lock.acquire()
