"""What is learned of another process: its state, its use of cores, its answer and its stack."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from launchers import inspection
from launchers.activity import ActivityRecord
from launchers.inspection import GONE, RUNS, STOPPED, CoreTime, core_time
from tests.mpirun import ROOT
from tests.speed import limit

counted = pytest.mark.skipif(core_time(os.getpid()) is None, reason="this kernel does not count waits for a core")


CHILD = """
import sys
from launchers import inspection
from launchers.activity import ActivityRecord
record, _ = ActivityRecord.create()
world = record.new_activity()
world.watch(7, survives=False, hang_timeout=None)
record.pid, record.stacks, record.socket = {pid}, inspection.write_stacks_upon_signal(), sys.argv[1].encode()
inspection.answer(sys.argv[1], lambda: {{"7": {{"doing": "this"}}}})
print(flush=True)
def loops():
    {loop}
loops()
"""


@contextmanager
def child(loop, pid="__import__('os').getpid()"):
    """A process that shows what it does, and then loops in this way."""
    name = f"test-{os.getpid()}-{time.monotonic_ns()}"
    command = [sys.executable, "-c", CHILD.format(loop=loop, pid=pid), name]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    # `input()` ends at once where the suite has no input
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        try:
            select.select([process.stdout], [], [], limit(60))
            process.stdout.readline()
            yield process, name
        finally:
            process.kill()


def asked(record, pid):
    found = inspection.inspect(record, pid, detailed=True)
    return found["answers"], found["stack"], found["state"]


def test_a_process_answers_and_is_found_by_its_pid():
    with child("input()") as (process, name):
        record = ActivityRecord.of(process.pid)
        assert (record.pid, record.socket.decode()) == (process.pid, name)
        assert [reading.group for reading in record.read()] == [7]
        answers, stack = {}, ""
        until = time.monotonic() + limit(10)
        while not answers and time.monotonic() < until:
            answers, stack, state = asked(record, process.pid)
        assert (answers, stack, state) == ({"7": {"doing": "this"}}, "", RUNS)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert asked(record, process.pid) == ({}, "", STOPPED)
        process.kill()
        process.wait()
        assert inspection.state_of(process.pid) == GONE
        assert record.read()[0].group == 7  # what it has shown can still be read
    assert ActivityRecord.of(process.pid) is None
    with child("input()", pid=1) as (process, _):
        assert ActivityRecord.of(process.pid) is None  # the memory of another process, which it has inherited


@pytest.mark.parametrize("moves", [False, True])
def test_what_a_process_says_does_not_count_once_it_has_moved_on(moves, monkeypatch):
    """What it was in is then this world's collective, and not another one's."""

    def ask(name):
        if moves:
            world.begin("message 1", time.perf_counter())
        return {"7": {"doing": "in a collective", "crossed": True}}

    record, _ = ActivityRecord.create()
    world = record.new_activity()
    world.watch(7, survives=False, hang_timeout=None)
    monkeypatch.setattr(inspection, "ask", ask)
    found = inspection.inspect(record, os.getpid(), detailed=True)
    assert (bool(found["answers"]), found["asked"]) == (not moves, not moves)
    assert found["worlds"][0].inside is moves


def test_a_process_whose_python_is_held_by_c_code_writes_its_stack():
    with child("import re; re.match(r'(a+)+$', 'a' * 200 + 'b')") as (process, _):
        record, stack = ActivityRecord.of(process.pid), ""
        until = time.monotonic() + limit(20)
        while "in match" not in stack and time.monotonic() < until:
            answers, stack, _ = asked(record, process.pid)
        assert answers == {}
        assert "in match" in stack
        assert "in loops" in stack
    assert inspection.written_stacks(process.pid, -1) == ""
    assert not inspection.compiles(stack)


def test_a_program_that_uses_the_signal_itself_keeps_it():
    handler = signal.signal(signal.SIGURG, lambda *_: None)
    try:
        assert inspection.write_stacks_upon_signal() == -1
    finally:
        signal.signal(signal.SIGURG, handler)


# --- the use of cores -------------------------------------------------------------------------------------------------


@counted
def test_a_process_that_sleeps_uses_no_core():
    with subprocess.Popen(["sleep", "60"]) as sleeps:
        time.sleep(0.2)
        before = core_time(sleeps.pid)
        time.sleep(0.1)
        assert core_time(sleeps.pid).since(before).sleeps
        sleeps.kill()
    assert core_time(2**30) is None


@pytest.mark.parametrize(("later", "use", "waits", "sleeps"), [
    (CoreTime(10.0, 1.0, 2.0), (0.0, 0.0, 0.0), False, False),
    (CoreTime(20.0, 1.01, 2.01), (10.0, 0.01, 0.01), False, True),
    (CoreTime(20.0, 2.0, 2.0), (10.0, 1.0, 0.0), False, False),
    (CoreTime(15.0, 1.0, 30.0), (5.0, 0.0, 5.0), True, False),  # waits of several threads count once
    (CoreTime(15.0, 0.5, 1.5), (5.0, 0.0, 0.0), False, True),  # threads have ended
])  # fmt: skip
def test_use_of_cores_between_two_accounts(later, use, waits, sleeps):
    found = later.since(CoreTime(10.0, 1.0, 2.0))
    assert found == pytest.approx(use)
    assert (found.waits, found.sleeps) == (waits, sleeps)
