"""A directory has one writer: a lock file says which, and that it lives.

Locks of the operating system do not hold between hosts on every file system; that a file is made by one process alone
does. Its owner writes a number into it that grows every few seconds, its *beat*. On the host of the owner anybody can
see whether that process lives. From elsewhere, a lock without beats is taken for one whose owner has been killed. No
clocks are compared: who wants the lock looks twice.
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
_MISSED = 4  # beats, after which an owner on another host is taken for dead

_CLOCK_SET = 60.0  # seconds by which a process's birth may seem to have moved, when the host's clock was set

_log = logging.getLogger("adaptive")


class HeldError(Exception):
    """Another writer holds the lock. Says who."""


class Lock:
    """The right to write to a directory.

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
        """Whether it is this writer's, and nobody has taken it for dead."""
        return self._file is not None and _read(self._path).get("id") == self._owner["id"]

    def acquire(self) -> None:
        """Take the lock, that of a dead owner too; which takes a while if that was on another host.

        Raises:
          HeldError: its owner lives.
          OSError: the directory cannot be written.
        """
        self.release()
        while not self._create():
            found = _read(self._path)
            if not self._path.exists():
                continue  # given back in between
            if self._lives(found):
                raise HeldError(_words(found))
            with _alone(self._path.parent):
                if _read(self._path) == found:  # and not that of somebody who was quicker
                    self._path.unlink(missing_ok=True)
        self._over = threading.Event()
        threading.Thread(target=self._keep_beating, name="adaptive-lock", daemon=True).start()

    def release(self) -> None:
        """Give it back, if it is held."""
        self._over.set()
        if self._file is not None:
            held, file, self._file = self.held, self._file, None
            with suppress(OSError):
                os.close(file)
            if held:
                self._path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise if it is not this writer's any more.

        Raises:
          HeldError: another one has taken it.
        """
        if not self.held:
            raise HeldError(_words(_read(self._path)))

    def _create(self) -> bool:
        """Make the file, unless there is one: with all that it says, so that nobody finds one that says nothing yet."""
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
        """Into the file that was made, wherever it has been moved to: it cannot hit the lock of another."""
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
        """Whether the owner of a lock lives. Waits for some beats where it cannot be seen."""
        if found.get("place") == _place():
            return _is_running(found.get("pid"), found.get("born"))
        seconds = _MISSED * self._beat
        _log.warning("%s is locked%s: looking for %g s whether it is alive", self._path.parent, _words(found), seconds)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(self._beat / 5)
            now = _read(self._path)
            if now != found:
                return bool(now)  # it has beaten, or somebody else has come, or it has gone
        return False


def _linked(new: Path, path: Path) -> bool:
    """Give a file its name, unless there is one of that name."""
    try:
        os.link(new, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links: for a moment two could think that they have made it
        if path.exists():
            return False
        new.rename(path)
    return True


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Without anyone else in here, of this host at least, and of others where the file system sees to it."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # some cannot, and nobody may ever see the difference
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _read(path: Path) -> dict[str, Any]:
    """What a lock says; nothing if it says nothing that can be read."""
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
    """Where process numbers mean the same: a host, since it was started, and a container in it."""
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
