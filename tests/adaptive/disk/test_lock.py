"""One writer at a time: the owner of a directory's lock, and when another takes over."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from adaptive.disk.lock import HeldError, acquire, release
from tests.speed import limit


def test_one_writer_at_a_time(tmp_path):
    mine = acquire(tmp_path)
    with pytest.raises(HeldError, match=f"by process {os.getpid()} on .*, since 20"):
        acquire(tmp_path)
    release(mine)
    release(acquire(tmp_path))


OTHER = """
import os, sys, time
from pathlib import Path
from adaptive.disk.lock import acquire
acquire(Path(sys.argv[1]))
if os.fork() == 0:
    time.sleep(60)
print("held", flush=True)
sys.stdin.read()
"""


def test_another_process_is_named_and_followed_at_once_when_it_is_killed(tmp_path):
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(HeldError, match=f"by process {other.pid} on .*, since 20"):
            acquire(tmp_path)
        other.kill()
        other.wait(timeout=limit(60))  # a forked child may live on
        release(acquire(tmp_path))
    finally:
        os.killpg(other.pid, signal.SIGKILL)
        other.communicate(timeout=limit(60))


def test_a_file_system_without_locks_is_logged(tmp_path, monkeypatch, caplog):
    def refused(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    release(acquire(tmp_path))
    assert "No locks available. Let only one job write to it" in caplog.text
