"""Memory shared by the processes of one host: an anonymous file in memory, which others open through `/proc`.

Different hosts may have the same name, and in another pid namespace the same path is another file. The file therefore
begins with a random token, which is sent with the path and compared.
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
from typing import NamedTuple

import numpy as np

_TOKEN = 64  # bytes: one cache line, so that the data after it are aligned


class SharedFileAddress(NamedTuple):
    """The path of a process's shared file ("" if there is none), and its token."""

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
        token = secrets.token_bytes(_TOKEN)
        try:
            self._file = os.memfd_create("adaptive")
            os.posix_fallocate(self._file, 0, _TOKEN + size)  # fails now if memory is short, instead of by SIGBUS later
            whole = np.frombuffer(mmap.mmap(self._file, _TOKEN + size), np.uint8)
        except (AttributeError, OSError):
            self.close()
            whole = np.zeros(_TOKEN + size, np.uint8)
        whole[:_TOKEN] = np.frombuffer(token, np.uint8)
        self.memory = whole[_TOKEN:]
        self.address = SharedFileAddress("" if self._file is None else f"/proc/{os.getpid()}/fd/{self._file}", token)

    def close(self) -> None:
        """Close the file, so that no further process can open it. Existing mappings stay valid."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def open_shared(address: SharedFileAddress) -> np.ndarray:
    """Return the shared memory of another process of this host, read-only.

    Args:
      address: the address that the other process has sent.

    Raises:
      OSError: it cannot be opened.
      ValueError: the path is not a shared file, or another one.
    """
    file = os.open(address.path, os.O_RDONLY | os.O_NONBLOCK)  # it may be a pipe
    try:
        state = os.fstat(file)
        if not stat.S_ISREG(state.st_mode) or state.st_size < _TOKEN:
            raise ValueError(f"{address.path} is not a shared file")
        whole = np.frombuffer(mmap.mmap(file, state.st_size, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(file)
    if whole[:_TOKEN].tobytes() != address.token:
        raise ValueError(f"{address.path} is another file")
    return whole[_TOKEN:]
