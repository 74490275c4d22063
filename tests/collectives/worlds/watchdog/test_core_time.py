"""The kernel's account of waits for a core."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from collectives.worlds.watchdog.core_time import MOST_EXCUSED, UNKNOWN_USE, CoreTime, CoreUse, CoreWaits, core_time

counted = pytest.mark.skipif(core_time(os.getpid()) is None, reason="this kernel does not count waits for a core")


@contextmanager
def loops(number):
    """Processes on one core that loop."""
    core = max(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(number)]
    try:
        for process in started:
            process.stdout.readline()
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def account(pid, seconds):
    """The account of a process over some time: seconds, seconds run, and seconds waited for a core."""
    begin, before = time.monotonic(), core_time(pid)
    time.sleep(seconds)
    after, span = core_time(pid), time.monotonic() - begin
    return span, after.ran - before.ran, after.core_wait(before, span)


@counted
def test_a_process_among_many_on_one_core_waits_for_it():
    with loops(8) as started:
        span, ran, wait = account(started[0].pid, 1.0)
        assert wait > 0.5 * span
        assert wait > ran
        started[0].send_signal(signal.SIGSTOP)
        os.waitpid(started[0].pid, os.WUNTRACED)
        _, ran, wait = account(started[0].pid, 0.3)
        assert (ran, wait) == (0.0, 0.0)  # stopped: not ready to run


@counted
def test_a_process_that_sleeps_waits_for_no_core():
    with subprocess.Popen(["sleep", "60"]) as sleeps:
        time.sleep(0.2)
        span, _, wait = account(sleeps.pid, 0.5)
        assert wait < 0.5 * span
        sleeps.kill()


@counted
def test_the_calling_thread_can_be_left_out():
    assert core_time(os.getpid()).ready  # this thread runs
    with subprocess.Popen(["sleep", "60"]) as sleeps:
        assert core_time(sleeps.pid, without=sleeps.pid) is None
        sleeps.kill()


def test_a_process_that_does_not_exist_has_no_account():
    assert core_time(2**30) is None


def test_a_wait_that_is_not_over_counts():
    """The kernel adds a wait at its end, and a process may get no core for long."""
    ready, asleep = CoreTime(1.0, 2.0, True), CoreTime(1.0, 2.0, False)
    assert ready.core_wait(ready, 5.0) == 5.0
    assert asleep.core_wait(asleep, 5.0) == 0.0
    assert ready._replace(ran=6.0).core_wait(ready, 5.0) == 0.0  # it ran all the time
    assert asleep._replace(queued=4.5).core_wait(asleep, 5.0) == 2.5
    assert asleep._replace(queued=30.0).core_wait(asleep, 5.0) == 5.0  # several threads
    assert asleep.core_wait(ready._replace(queued=3.0), 5.0) == 0.0  # threads have ended


def test_waits_are_excused_up_to_a_limit():
    waits = CoreWaits(hang_timeout=2.0)
    assert waits.add(1, 100.0, CoreTime(0.0, 0.0, False)) == UNKNOWN_USE
    assert waits.add(1, 101.0, CoreTime(0.1, 0.75, False)) == CoreUse(1.0, 0.1, 0.75)
    assert waits.excused(1) == 0.75
    assert waits.excused(2) == 0.0
    waits.add(1, 1000.0, CoreTime(0.0, 899.0, False))
    assert waits.excused(1) == MOST_EXCUSED * 2.0
    waits.forget(1)
    assert waits.excused(1) == 0.0
    assert waits.add(1, 1001.0, CoreTime(0.0, 900.0, False)) == UNKNOWN_USE


@pytest.mark.parametrize(("use", "waits", "sleeps"), [
    (UNKNOWN_USE, False, False),
    (CoreUse(10.0, 0.01, 0.01), False, True),
    (CoreUse(10.0, 1.0, 0.0), False, False),
    (CoreUse(10.0, 0.1, 8.0), True, False),
])  # fmt: skip
def test_activity_of_a_process(use, waits, sleeps):
    assert (use.waits, use.sleeps) == (waits, sleeps)
