"""The right of one writer to write to a directory: a locked file that names its owner.

The system's lock ends with the process, however that ends. It holds between hosts if the file system has locks, as
NFS 4, GPFS, CephFS and Lustre (mounted with `flock`) do.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
import weakref
from pathlib import Path

LOCK = "writer.lock"
_LOCKS: weakref.WeakSet[Lock] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: list(map(Lock.drop, _LOCKS)))  # or a child would keep its parent's lock


class HeldError(Exception):
    """Another writer holds the lock; the message names it."""


class Lock:
    """The exclusive right to write to a directory."""

    def __init__(self, directory: Path):
        self._path, self._file = directory / LOCK, -1
        _LOCKS.add(self)

    def acquire(self) -> None:
        """Acquire the lock; anew if its file was deleted. Raises a HeldError, or an OSError of the file system."""
        while not self._is_held():  # a former owner may delete the file between its opening and its locking
            self.drop()
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(self._file, 300, 0).decode(errors="replace")
                self.drop()
                raise HeldError(f" by {owner}") from None
            except OSError as error:  # the file system has no locks
                logging.getLogger("adaptive").warning("%s: %s. Let only one job write to it", self._path, error)
            os.truncate(self._file, 0)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}, since {since}".encode(), 0)

    def release(self) -> None:
        """Release the lock, if held."""
        if self._is_held():
            self._path.unlink()
        self.drop()

    def _is_held(self) -> bool:
        return self._file >= 0 and self._path.exists() and os.path.samestat(self._path.stat(), os.fstat(self._file))

    def drop(self) -> None:
        """Close the file. The lock ends when all processes that inherited the file have closed it."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
