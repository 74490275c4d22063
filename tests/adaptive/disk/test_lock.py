"""One writer at a time: the owner of a directory's lock, and when another takes over."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading

import pytest

from adaptive.disk.lock import LOCK, HeldError, Lock
from tests.speed import limit


def held(lock) -> bool:
    try:
        Lock(lock).acquire()
    except HeldError:
        return True
    return False


def test_one_writer_at_a_time(tmp_path):
    first, second = Lock(tmp_path), Lock(tmp_path)
    first.acquire()
    first.acquire()
    with pytest.raises(HeldError, match=f" by process {os.getpid()} on .*, since 20"):
        second.acquire()
    second.release()  # it is not his
    assert held(tmp_path)
    first.release()
    second.acquire()
    first.release()
    assert held(tmp_path)
    second.release()
    assert list(tmp_path.iterdir()) == []


OTHER = """
import os, sys, time
from pathlib import Path
from adaptive.disk.lock import Lock
lock = Lock(Path(sys.argv[1]))
lock.acquire()
if "fork" in sys.argv and os.fork() == 0:
    time.sleep(60)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("fork", ["fork", ""])
def test_another_process_is_named_and_followed_at_once_when_it_is_killed(tmp_path, fork):
    command = [sys.executable, "-c", OTHER, str(tmp_path), fork]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(HeldError, match=f" by process {other.pid} on .*, since 20"):
            Lock(tmp_path).acquire()
        other.kill()
        other.wait(timeout=limit(60))  # a forked child may live on
        mine = Lock(tmp_path)
        mine.acquire()
        assert held(tmp_path)
        mine.release()
    finally:
        os.killpg(other.pid, signal.SIGKILL) if fork else None
        other.communicate(timeout=limit(60))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff"])
def test_a_file_without_an_owner_is_taken_over(tmp_path, content):
    (tmp_path / LOCK).write_bytes(content)
    mine = Lock(tmp_path)
    mine.acquire()
    assert held(tmp_path)
    mine.release()


def test_a_file_that_was_deleted_is_made_anew(tmp_path):
    mine = Lock(tmp_path)
    mine.acquire()
    (tmp_path / LOCK).unlink()
    mine.acquire()
    assert held(tmp_path)
    mine.release()


def test_a_file_system_without_locks_is_logged(tmp_path, monkeypatch, caplog):
    def refused(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    mine = Lock(tmp_path)
    mine.acquire()
    assert "No locks available. Let only one job write to it" in caplog.text
    mine.release()


def test_one_of_many_is_the_owner(tmp_path):
    for _ in range(20):
        locks, start, taken = [Lock(tmp_path) for _ in range(8)], threading.Barrier(8), []

        def take(lock, start=start, taken=taken):
            start.wait()
            try:
                lock.acquire()
                taken.append(lock)
            except HeldError:
                pass

        threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert len(taken) == 1
        taken[0].release()
        assert list(tmp_path.iterdir()) == []
