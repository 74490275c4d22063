"""What a rank says of itself, and whom it watches where no launcher does. Other ranks are made up; jobs: tests/mpi."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.base.process.thread_status import IN_A_STEP, thread_status, thread_status_of
from collectives.worlds import watchdog
from collectives.worlds.transport.process_group import Process
from collectives.worlds.watchdog import Watchdog, check_hang_timeout
from launchers.activity import INSIDE, LEFT, OUTSIDE, ActivityReading, WorldActivity
from launchers.inspection import GONE, RUNS


@pytest.mark.parametrize("hang_timeout", [-1, math.nan, math.inf, "60", True, [60]])
def test_settings_that_are_no_seconds(hang_timeout):
    with pytest.raises(ad.CollectiveError, match=r"hang_timeout=.*must be the seconds") as caught:
        comm.world(hang_timeout=hang_timeout)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("hang_timeout", [0, 60, 0.5, np.float32(2), jnp.int32(3)])
def test_settings_that_are_seconds(hang_timeout):
    assert check_hang_timeout(hang_timeout) == float(hang_timeout)
    assert check_hang_timeout(None) is None
    with comm.world(devices=jax.local_devices()[:1], hang_timeout=hang_timeout) as world:
        assert isinstance(world, comm.SoloWorld)


# --- what a thread does -----------------------------------------------------------------------------------------------


def test_descriptions_of_a_threads_activity():
    inner = thread_status("in the inner")(lambda: thread_status_of(sys._getframe()))
    found = thread_status("in the outer")(lambda: inner())()
    assert str(found) == "in the inner, in the outer"
    assert found.line.startswith("test_watchdog.py:")
    assert not found.compiles
    assert not found.exchanges
    assert str(thread_status_of(sys._getframe())) == "in the script's own code, between steps"


def test_compiling_is_seen():
    """What a user compiles, too."""
    salt = time.time()

    def loss(s):
        for i in range(30):  # large enough to take a while, and new to any cache
            s = jnp.sin(s + i * salt) * jnp.cos(s)
        return s

    thread = threading.Thread(target=lambda: jax.jit(loss)(1.0))
    thread.start()
    seen = set()
    while thread.is_alive():
        if frame := sys._current_frames().get(thread.ident):
            seen.add(thread_status_of(frame))
    assert any(found.compiles and "compiling" in found.words for found in seen)


class Transport:
    def __init__(self):
        self.activity, self.survives, self.threads = WorldActivity(), True, {threading.get_ident(): "main"}


@pytest.fixture
def transport():
    return Transport()


EVERYONE = [Process(range(n, n + 1), "h", n // 3, os.getpid() + n) for n in range(4)]  # the last one on another host


class Rank:
    """Another rank of this host, as its memory shows it."""

    def __init__(self, phase=OUTSIDE, state=RUNS):
        self.reading = ActivityReading(0, True, 2.0, phase, 7, 1.0, "m", None)
        self.state, self.socket, self.stacks = state, b"", -1

    def read(self):
        return [self.reading._replace(group=GROUP[0], survives=GROUP[1])]


GROUP = [0, True]


@pytest.fixture
def watch(monkeypatch, transport):
    """Watch others of this host, and let the present rank wait for so long. Returns what was killed, or "end"."""
    made = []

    def begin(*others, waited=0.0, own=0, seconds=5):
        ranks = {EVERYONE[n].pid: rank for n, rank in zip([n for n in range(3) if n != own], others, strict=True)}
        done, now = [], [0.0]
        monkeypatch.setattr(watchdog, "_this_process", lambda: process)
        monkeypatch.setattr(watchdog.ActivityRecord, "of", lambda pid: ranks.get(pid))
        monkeypatch.setattr(watchdog.inspection, "state_of", lambda pid: ranks[pid].state)
        monkeypatch.setattr(watchdog.inspection, "core_time", lambda pid: None)
        monkeypatch.setattr(watchdog, "_kill", lambda pids: done.append(tuple(pid - os.getpid() for pid in pids)))
        monkeypatch.setattr(watchdog, "run_exit_hooks", lambda: done.append("hooks"))
        monkeypatch.setattr(watchdog.os, "_exit", lambda code: done.append("exit"))
        output = SimpleNamespace(flush=lambda: done.append("flushed"))
        monkeypatch.setattr(watchdog, "sys", SimpleNamespace(stdout=output, stderr=output))
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: None))
        process = SimpleNamespace(new_activity=WorldActivity, watches=True, watchdogs=made)
        watching = Watchdog(transport, 2.0, lambda code: done.append(("abort", code)))
        watching._pid = EVERYONE[own].pid
        watching.watch(5, EVERYONE, own)
        GROUP[:] = watching.group, transport.survives
        mine = ActivityReading(watching.group, transport.survives, 2.0, INSIDE, 8, 1.0, "message 1", None)
        while now[0] < seconds and "exit" not in done:
            now[0] += 0.5
            watching.check(mine._replace(seconds=now[0]))
        watching._pid = os.getpid()
        return done

    yield begin
    for watching in made.copy():
        watching.close()


def test_a_rank_of_this_host_is_named_and_killed(watch, caplog):
    assert watch(Rank(INSIDE), Rank()) == [(2,)]
    assert f"rank 0 (pid {os.getpid()} on h) has waited for 2.0 s in message 1:\n    rank 2 (pid" in caplog.text
    assert "killed, and lost." in caplog.text


def test_the_job_ends_where_the_others_cannot_continue(watch, transport):
    transport.survives = False
    assert watch(Rank(INSIDE), Rank()) == [(2,), "hooks", "flushed", "flushed", ("abort", 1), "exit"]


def test_one_rank_that_waits_acts_for_all(watch, caplog):
    assert watch(Rank(INSIDE), Rank(), own=1) == []  # rank 0 does
    assert watch(Rank(OUTSIDE), Rank(INSIDE), own=1) == [(0,)]


@pytest.mark.parametrize("survives", [False, True])
def test_a_rank_that_has_left_is_not_waited_for(survives, watch, transport):
    transport.survives = survives
    assert watch(Rank(LEFT), Rank(INSIDE), seconds=1.5)[0] == (1,)
    assert (watch(Rank(state=GONE), Rank(INSIDE), seconds=1.5) == []) is survives


def test_ranks_of_other_hosts_are_named_and_waited_for_longer(watch, caplog):
    assert watch(Rank(INSIDE), Rank(INSIDE), seconds=19) == []
    assert "The ranks of other hosts cannot be seen from here: rank 3 (pid" in caplog.text
    assert watch(Rank(INSIDE), Rank(INSIDE), seconds=24) == [
        (1, 2),
        "hooks",
        "flushed",
        "flushed",
        ("abort", 1),
        "exit",
    ]


def test_a_pid_that_another_process_has_by_now_is_not_killed(monkeypatch):
    killed = []
    monkeypatch.setattr(watchdog.ActivityRecord, "of", {1: object()}.get)
    monkeypatch.setattr(watchdog.os, "kill", lambda pid, number: killed.append((pid, number)))
    watchdog._kill([1, 2])
    assert killed == [(1, signal.SIGKILL)]


def test_without_proc_all_processes_have_one_pid_namespace(monkeypatch):
    def no_proc(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(watchdog.os, "readlink", no_proc)
    assert watchdog.pid_space() == ""


def test_what_a_rank_says_of_itself_is_what_its_threads_do(transport, monkeypatch):
    watching = Watchdog(transport, None, print)
    try:
        assert thread_status(IN_A_STEP)(lambda: watching.describe())()["idle"]
        assert thread_status("compiling", compiles=True)(lambda: watching.describe())()["compiles"]
        said = thread_status("in a collective", exchanges=True)(lambda: watching.describe())()
        assert (said["crossed"], said["compiles"], said["idle"]) == (True, False, False)
        assert said["doing"].startswith("in a collective (test_watchdog.py:")
        assert "test_what_a_rank_says" in said["stack"]
        wait = SimpleNamespace(words=lambda: "waits for a file", stack=lambda: "the stack of its reader")
        monkeypatch.setattr(watchdog, "wait_of", {threading.get_ident(): wait}.get)
        said = thread_status(IN_A_STEP)(lambda: watching.describe())()
        assert (said["stack"], said["idle"]) == ("the stack of its reader", False)
        assert said["doing"].startswith(f"{IN_A_STEP}; waits for a file")
    finally:
        watching.close()


@pytest.mark.parametrize(("error", "words"), [
    (None, "its script is over, at its end, or by sys.exit(). The last that it took part in is a barrier"),
    (ValueError("no"), "its script is over, by ValueError: no. The last that it took part in is a barrier"),
])  # fmt: skip
def test_others_learn_why_a_process_leaves(transport, monkeypatch, error, words):
    watching = Watchdog(transport, None, print)
    watching.watch(5, EVERYONE, 0)
    transport.activity.begin("a barrier", 0.0)
    monkeypatch.setattr(sys, "last_exc", error, raising=False)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    watching._at_exit()
    watching.close("again")
    assert transport.activity.about == words
