"""The writer lock of a directory: a lock file that names the writer and shows that it is alive.

Locks of the operating system don't hold between hosts on every file system, but exclusive creation of a file does. The
owner writes a growing number into the file every few seconds, its *beat*. On the owner's host, other processes check
whether its process runs. On other hosts, a lock without new beats belongs to a killed owner. No clocks are compared:
the file is read twice.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LOCK = "writer.lock"
BEAT_SECONDS = 5.0
_MISSED = 4  # missed beats, after which an owner on another host counts as dead

_CLOCK_SET = 60.0  # tolerance of a process's start time in seconds, as the host's clock may be adjusted

_log = logging.getLogger("adaptive")


class HeldError(Exception):
    """Another writer holds the lock; the message names it."""


class Lock:
    """The exclusive right to write to a directory.

    Args:
      beat: seconds between beats.
    """

    def __init__(self, directory: Path, beat: float = BEAT_SECONDS):
        self._path, self._beat = directory / LOCK, beat
        self._owner: dict[str, Any] = {}
        self._file: int | None = None
        self._over = threading.Event()

    @property
    def held(self) -> bool:
        """Whether this writer holds the lock, and no other has taken it over."""
        owns = self._file is not None and self._owner["pid"] == os.getpid()  # and not a forked child
        return owns and _read(self._path).get("id") == self._owner["id"]

    def acquire(self) -> None:
        """Acquire the lock, also from a dead owner; that takes some beats if the owner was on another host.

        Raises:
          HeldError: the owner is alive.
          OSError: the directory is not writable.
        """
        self.release()
        while not self._create():
            found = _read(self._path)
            if not self._path.exists():
                continue  # released by its owner
            if self._lives(found):
                raise HeldError(_words(found))
            with _alone(self._path.parent):
                if _read(self._path) == found:  # no other process has taken it over
                    self._path.unlink(missing_ok=True)
        self._over = threading.Event()
        threading.Thread(target=self._keep_beating, name="adaptive-lock", daemon=True).start()

    def release(self) -> None:
        """Release the lock, if held."""
        self._over.set()
        if self._file is not None:
            held, file, self._file = self.held, self._file, None
            with suppress(OSError):
                os.close(file)
            if held:
                self._path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise if this writer has lost the lock.

        Raises:
          HeldError: another writer holds it.
        """
        if not self.held:
            raise HeldError(_words(_read(self._path)))

    def _create(self) -> bool:
        """Create the lock file unless it exists; other processes never see it empty."""
        import psutil

        host, pid, born = socket.gethostname(), os.getpid(), psutil.Process().create_time()
        own = {"host": host, "pid": pid, "place": _place(), "born": born}
        self._owner = {"id": uuid.uuid4().hex, "since": time.strftime("%Y-%m-%d %H:%M:%S"), **own}
        new = self._path.with_name(f"{LOCK}.{self._owner['id']}")
        self._file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        made = False
        try:
            self._write(0)
            made = _linked(new, self._path)
        finally:
            new.unlink(missing_ok=True)
            if not made:
                file, self._file = self._file, None
                os.close(file)
        return made

    def _write(self, beat: int) -> None:
        """Write a beat through the open file, which cannot be another writer's lock file."""
        file = self._file
        if file is not None:
            os.pwrite(file, json.dumps({**self._owner, "beat": f"{beat:012}"}).encode(), 0)
            os.fsync(file)  # so that other hosts see it

    def _keep_beating(self) -> None:
        over, beat = self._over, 0
        while not over.wait(self._beat):
            beat += 1
            with suppress(OSError):
                self._write(beat)

    def _lives(self, found: dict[str, Any]) -> bool:
        """Return whether a lock's owner is alive. Waits for some beats if the owner is on another host."""
        if found.get("place") == _place():
            return _is_running(found.get("pid"), found.get("born"))
        seconds = _MISSED * self._beat
        _log.warning("%s is locked%s: looking for %g s whether it is alive", self._path.parent, _words(found), seconds)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(self._beat / 5)
            now = _read(self._path)
            if now != found:
                return bool(now)  # a new beat or another owner; False if the lock was released
        return False


def _linked(new: Path, path: Path) -> bool:
    """Link a file to its final name. Return False if that name exists."""
    try:
        os.link(new, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links: two processes could briefly both succeed
        if path.exists():
            return False
        new.rename(path)
    return True


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Exclude other processes of this host, and of other hosts if the file system supports it."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system can lock
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a lock file; {} if it is missing or not readable."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _words(found: dict[str, Any]) -> str:
    who = "this process" if (found.get("place"), found.get("pid")) == (_place(), os.getpid()) else "process"
    if not found:
        return ""
    pid, host, since = found.get("pid"), found.get("host"), found.get("since")
    return f" by {who}{f' {pid} on {host}' * (who == 'process')}, since {since}"


def _place() -> list[str]:
    """Return the identity of this pid namespace: host name, boot id and container."""
    place = [socket.gethostname()]
    with suppress(OSError):
        place += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return place


def _is_running(pid: Any, born: Any) -> bool:
    import psutil

    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - born) < _CLOCK_SET
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, TypeError, ValueError):
        return False
