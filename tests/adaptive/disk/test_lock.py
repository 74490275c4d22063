"""One writer at a time: the owner of a directory's lock, and when another takes over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

from adaptive.disk.lock import LOCK, HeldError, Lock
from tests.speed import limit

BEAT = 0.02  # seconds


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))


def test_one_writer_at_a_time(tmp_path):
    first, second = Lock(tmp_path), Lock(tmp_path)
    first.acquire()
    assert first.held
    with pytest.raises(HeldError, match="by this process, since 20"):
        second.acquire()
    assert first.held
    assert not second.held
    first.release()
    second.acquire()
    assert second.held
    first.release()  # it is not his any more
    assert second.held
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_another_process_that_lives_is_named(tmp_path):
    program = f"""
import sys
from pathlib import Path
from adaptive.disk.lock import Lock
lock = Lock(Path({str(tmp_path)!r}))
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    with pytest.raises(HeldError, match=f" by process {other.pid} on .*, since 20"):
        Lock(tmp_path).acquire()
    other.kill()
    other.communicate(timeout=limit(60))
    mine = Lock(tmp_path, beat=3600)  # nothing is waited for: it can be seen that the owner is dead
    mine.acquire()
    assert mine.held
    mine.release()


def test_an_owner_on_another_host_is_alive_while_its_heartbeat_continues(tmp_path, caplog, monkeypatch):
    owner, other = Lock(tmp_path, beat=BEAT), Lock(tmp_path, beat=10 * BEAT)
    with monkeypatch.context() as patch:
        patch.setattr("adaptive.disk.lock._place", lambda: ["elsewhere"])
        patch.setattr("socket.gethostname", lambda: "elsewhere")
        owner.acquire()
    with pytest.raises(HeldError, match=f" by process {os.getpid()} on elsewhere"):
        other.acquire()
    assert "looking for" in caplog.text
    owner._over.set()  # it beats no more
    other.acquire()
    assert other.held
    assert not owner.held
    with pytest.raises(HeldError, match="by this process"):
        owner.check()
    owner._write(7)  # woken up again, it does not hit the other's lock
    assert other.held
    other.release()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}'])
def test_a_stale_damaged_lock_is_taken_over(tmp_path, content):
    (tmp_path / LOCK).write_text(content)
    mine = Lock(tmp_path, beat=BEAT)
    mine.acquire()
    assert mine.held
    mine.release()


def test_where_files_have_one_name_only(tmp_path, monkeypatch):
    def no_links(source, target):
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr("os.link", no_links)
    test_one_writer_at_a_time(tmp_path)


def test_one_of_many_waiters_replaces_a_dead_owner(tmp_path):
    dead = Lock(tmp_path)
    dead.acquire()
    edit(tmp_path / LOCK, born=0.0)
    locks, start = [Lock(tmp_path) for _ in range(8)], threading.Barrier(8)
    taken = []

    def take(lock):
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
    assert [lock.held for lock in locks].count(True) == 1
    taken[0].release()
    assert list(tmp_path.iterdir()) == []
