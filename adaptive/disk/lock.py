"""The right of one process to write to a directory: a locked file that names its owner.

The system's lock ends with the process, however that ends. It holds between hosts if the file system has locks, as
NFS 4, GPFS, CephFS and Lustre (mounted with `flock`) do.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from pathlib import Path

LOCK = "writer.lock"
_HELD: set[int] = set()
os.register_at_fork(after_in_child=lambda: list(map(release, tuple(_HELD))))  # or a child would keep its parent's lock


class HeldError(Exception):
    """Another writer holds the lock; the message names it."""


def acquire(directory: Path) -> int:
    """Lock a directory. Returns the open file, for `release`.

    Raises:
      HeldError: another process holds the lock, or this one does.
      OSError: the file cannot be opened.
    """
    file = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(file, 300, 0).decode(errors="replace")
        os.close(file)
        raise HeldError(f"by {owner}") from None
    except OSError as error:  # the file system has no locks
        logging.getLogger("adaptive").warning("%s: %s. Let only one job write to it", directory / LOCK, error)
    _HELD.add(file)
    os.truncate(file, 0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}, since {since}".encode(), 0)
    return file


def release(file: int) -> None:
    """Release a lock. It ends when all processes that inherited the file have closed it."""
    if file in _HELD:
        _HELD.remove(file)
        os.close(file)
