"""Stacks of threads, and processes of this host that are looked at and killed."""

from __future__ import annotations

import subprocess
import sys
import threading

import psutil
import pytest

from collectives.worlds.watchdog import stacks
from tests.speed import limit


def functions_of(threads):
    """Return the names of the functions that the threads are in, and of those that called them."""
    names = set()
    for frame in stacks.frames_of(threads):
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
    return names


def test_frames_are_those_of_the_threads_and_the_main_threads_where_none_is_alive():
    done = threading.Event()

    def waits_for_the_test():
        done.wait(limit(60))

    thread = threading.Thread(target=waits_for_the_test)
    thread.start()
    ident, own = thread.ident, sys._getframe().f_code.co_name
    found = functions_of([ident])
    done.set()
    thread.join(limit(60))
    assert "waits_for_the_test" in found
    assert own not in found
    assert own in functions_of([ident])


@pytest.fixture
def other():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield stacks.this_process()._replace(
            pid=process.pid, created=psutil.Process(process.pid).create_time(), file=-1
        )
        process.kill()


def test_a_process_is_killed_once(other):
    assert stacks.look_at(other)[0] == stacks.RUNS
    assert stacks.kill(other)
    psutil.Process(other.pid).wait(limit(60))
    assert stacks.look_at(other)[0] == stacks.GONE
    assert stacks.kill(other)


def test_a_process_that_has_taken_over_a_pid_is_not_killed(other):
    assert stacks.kill(other._replace(created=other.created - 100))
    assert stacks.look_at(other)[0] == stacks.RUNS


def test_a_process_of_another_container_cannot_be_killed_nor_looked_at(other):
    elsewhere = other._replace(space="pid:[1]")
    assert not stacks.kill(elsewhere)
    assert stacks.look_at(elsewhere) == (stacks.UNKNOWN, "")
    assert stacks.look_at(other)[0] == stacks.RUNS


@pytest.mark.parametrize(("error", "seen", "killed"), [
    (psutil.NoSuchProcess(1), stacks.GONE, True),
    (psutil.AccessDenied(1), stacks.UNKNOWN, False),
])  # fmt: skip
def test_a_process_that_ends_meanwhile_or_belongs_to_another_user(other, monkeypatch, error, seen, killed):
    def fails(_process):
        raise error

    monkeypatch.setattr(psutil.Process, "status", fails)
    monkeypatch.setattr(psutil.Process, "kill", fails)
    assert stacks.look_at(other) == (seen, "")
    assert stacks.kill(other) == killed


@pytest.mark.parametrize(("status", "seen"), [
    (psutil.STATUS_ZOMBIE, stacks.GONE),
    (psutil.STATUS_DEAD, stacks.GONE),
    (psutil.STATUS_STOPPED, stacks.STOPPED),
    (psutil.STATUS_TRACING_STOP, stacks.TRACED),
    (psutil.STATUS_SLEEPING, stacks.RUNS),
])  # fmt: skip
def test_states_of_processes(other, monkeypatch, status, seen):
    monkeypatch.setattr(psutil.Process, "status", lambda _process: status)
    assert stacks.look_at(other)[0] == seen


@pytest.mark.parametrize(("dump", "shown"), [
    (["idle.py", "adaptive/data/reading.py", "adaptive/program/program.py", "main.py"],
     ["adaptive/data/reading.py", "main.py", "adaptive/program/program.py"]),
    (["adaptive/data/fetch_thread.py", "main.py"], ["main.py"]),
    (["adaptive/data/fetch_thread.py\nadaptive/data/rows.py", "main.py"],
     ["adaptive/data/fetch_thread.py\nadaptive/data/rows.py", "main.py"]),
    ([], []),
])  # fmt: skip
def test_threads_that_read_or_are_in_a_program_are_shown_besides_the_main_one(other, monkeypatch, dump, shown):
    monkeypatch.setattr(stacks, "written_stacks", lambda pid, file: "\n\n".join([*dump, ""]))
    assert stacks.look_at(other) == (stacks.RUNS, "\n".join(shown))
