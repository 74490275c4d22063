"""Memory that processes of one host share: an anonymous file in memory, which one process makes and others open by way
of
`/proc`.

Different hosts may have the same name, and in another pid namespace the same path is another file. So the file begins
with a token, which is sent with the path, and which cannot be guessed.
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
from typing import NamedTuple

import numpy as np

_TOKEN = 64  # bytes, so that what is behind it begins a line of the cache


class SharedFileAddress(NamedTuple):
    """Where a process's file is, "" if there is none, and the token that it begins with."""

    path: str
    token: bytes


class SharedFile:
    """A file of this process. If the system cannot make it, or has no memory for it, memory that no other process can
    open.

    Attributes:
      memory: all zero at first; it stays when the file is closed.
      told: its address, for the others.
    """

    def __init__(self, size: int):
        self._file: int | None = None
        token = secrets.token_bytes(_TOKEN)
        try:
            self._file = os.memfd_create("adaptive")
            os.posix_fallocate(self._file, 0, _TOKEN + size)  # fail now, rather than by a signal when it is written
            whole = np.frombuffer(mmap.mmap(self._file, _TOKEN + size), np.uint8)
        except (AttributeError, OSError):
            self.close()
            whole = np.zeros(_TOKEN + size, np.uint8)
        whole[:_TOKEN] = np.frombuffer(token, np.uint8)
        self.memory = whole[_TOKEN:]
        self.told = SharedFileAddress("" if self._file is None else f"/proc/{os.getpid()}/fd/{self._file}", token)

    def close(self) -> None:
        """Close the file: no process opens it any more. Processes that have opened it keep it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def open_shared(told: SharedFileAddress, *, write: bool = False) -> np.ndarray:
    """Return memory of another process of this host.

    Raises:
      OSError, ValueError: it cannot be opened, or is another file.
    """
    file = os.open(told.path, (os.O_RDWR if write else os.O_RDONLY) | os.O_NONBLOCK)  # it may be a pipe
    try:
        state = os.fstat(file)
        if not stat.S_ISREG(state.st_mode) or state.st_size < _TOKEN:
            raise ValueError(f"{told.path} is not a shared file")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        whole = np.frombuffer(mmap.mmap(file, state.st_size, prot=access), np.uint8)
    finally:
        os.close(file)
    if whole[:_TOKEN].tobytes() != told.token:
        raise ValueError(f"{told.path} is another file")
    return whole[_TOKEN:]
