"""Processes that work, wait on standby, join, leave and are lost, as threads with a stand-in for MPI."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from types import SimpleNamespace

import pytest

from adaptive import Preempted, ReserveReleased, WorkerError
from collectives.worlds.elastic import elastic_processes
from tests.speed import limit

from .job_of_threads import Dies, Job


def polled(processes, workers):
    """Ask for so many workers, on rank 0 until those that are missing are ready."""
    missing = workers - len(processes.members)
    processes.request_workers(workers)
    end = time.monotonic() + limit(2)
    while processes._transport.rank == 0 and processes.poll_ready() < missing and time.monotonic() < end:
        time.sleep(0.001)
    if processes._transport.rank == 0:
        assert processes.poll_ready() == missing
    return processes


def state_of(processes):
    """Return what has arrived in the transfer of the run's state."""
    return processes.transfer_state(lambda: ("state", []), list)


def test_processes_go_on_standby_and_join_again():
    def script(number, processes):
        assert (processes.members, processes.generation) == ((0, 1, 2, 3), 0)
        assert (processes.least, processes.most, processes.capacity) == (2, 6, 6)
        assert [processes.nearest(n) for n in (1, 2, 3, 4, 5, 6, 9)] == [2, 2, 2, 4, 4, 6, 6]
        assert processes.workers == range(2 * number, 2 * number + 2)
        processes.begin_run()
        assert (processes.run_under_way, processes.in_reserve) == (True, number == 2)
        transferred = []
        if number == 2:
            assert processes._transport.rank == 3
            processes.wait(lambda: True)
        else:
            assert processes.poll_ready() == 0
            processes.begin_run()
            polled(processes, 6).change(6)
        assert (processes.members, processes.generation) == (tuple(range(6)), 2)
        assert (processes._transport.rank, processes._transport.completed) == (number, 0)
        assert processes.needs_state_transfer
        transferred.append(state_of(processes))
        assert not processes.needs_state_transfer
        assert state_of(processes) is None  # all have it
        processes.change(2)
        assert (processes.members, processes.in_reserve) == ((0, 1), number > 0)
        if number == 0:
            assert processes.most == 6
            polled(processes, 4).change(4)  # the first one on standby is enough
        else:
            processes.wait(lambda: True)
        if number < 2:
            assert processes.members == (0, 1, 2, 3)
            transferred.append(state_of(processes))
            processes.end_run()
        assert not (processes.in_reserve or processes.run_under_way)
        assert processes.members == (0, 1, 2, 3)
        assert processes.needs_state_transfer
        transferred.append(state_of(processes))
        processes.end_run()  # nothing: no run is under way
        assert processes._transport.group.comm.size == 3
        assert processes.losses == ()
        return transferred

    sent = ("state", [])
    assert Job(3, workers=4).run(script) == {0: [None, None, None], 1: [None, sent, None], 2: [sent, sent]}


@pytest.fixture(autouse=True)
def ends(monkeypatch):
    """The ends of processes; a process in `noticed` has received a termination signal so many seconds ago."""
    found = SimpleNamespace(left=0, joined=0, acknowledged=0, noticed={})

    def count(name):
        setattr(found, name, getattr(found, name) + 1)

    def leave_job():
        count("left")
        raise SystemExit(0)

    monkeypatch.setattr(elastic_processes.ending, "leave_job", leave_job)
    monkeypatch.setattr(elastic_processes.ending, "joined", lambda: count("joined"))
    monkeypatch.setattr(elastic_processes, "acknowledge_termination", lambda: count("acknowledged"))
    notice = lambda: found.noticed.get(threading.current_thread().name)  # noqa: E731
    monkeypatch.setattr(elastic_processes, "pending_termination", notice)
    return found


def in_reserve(processes):
    """Begin a run, and wait until the process joins, if it is on standby; return whether it was."""
    processes.begin_run()
    if was := processes.in_reserve:
        processes.wait(lambda: True)
    return was


@pytest.mark.parametrize(("terminated", "ends_by"), [(False, ReserveReleased), (True, Preempted)])
def test_processes_on_standby_are_released_at_the_end(ends, terminated, ends_by):
    def script(number, processes):
        processes.dismiss()  # nothing: no run is under way
        in_reserve(processes)
        processes._transport.lifetime.terminated = terminated
        processes.dismiss()
        return processes._transport.lifetime.closed

    first, second = Job(2, workers=2).run(script).values()
    assert first is False
    assert isinstance(second, ends_by)
    assert not getattr(second, "alone", False)
    assert ends.acknowledged == 1


def test_processes_on_standby_end_by_the_error_of_the_others():
    def script(number, processes):
        processes.report_failure("too early")  # nothing: no run is under way
        in_reserve(processes)
        processes.report_failure("it was too large")

    *_, second, third = Job(3, workers=2).run(script).values()
    for error in (second, third):
        assert isinstance(error, WorkerError)
        assert str(error).endswith("the workers have stopped: it was too large")


def test_workers_leave_for_good(ends):
    def script(number, processes):
        ends.noticed["process 1"] = SimpleNamespace(seconds=0.0)
        processes.begin_run()
        processes.change(6, leaving=(0, 2, 3))
        assert (number, processes.members, processes.most) == (2, (4, 5), 2)
        assert processes.unowned_slots == (0, 1, 2, 3)
        assert processes.generation == 4
        processes.change(2, leaving=(4,))  # nothing: the last ones stay
        return processes.members, processes.in_reserve

    first, second, third = Job(3).run(script).values()
    assert third == ((4, 5), False)
    assert str(first) == "it was dismissed by a hook, and the others continue"
    assert str(second) == "it received a termination signal, and the others continue"
    assert isinstance(first, Preempted) and first.alone
    assert ends.left == ends.acknowledged == 2


def test_survivors_go_on_without_lost_workers():
    def script(number, processes):
        if number == 1:
            raise Dies
        state_of(processes)
        assert processes._transport.group.comm.size == 3
        return processes.members, processes.generation, processes.most, processes.losses, processes.unowned_slots

    first, _, *others = Job(4).run(script).values()
    assert others == [first, first]
    members, generation, most, [loss], unowned = first
    assert (members, generation, most, unowned) == ((0, 1, 4, 5, 6, 7), 2, 6, (2, 3))
    assert str(loss) == "workers 2, 3 lost: rank 1 (pid 1 on a) disconnected in a step; 250 ms to repair."


def test_survivors_end_if_too_few_workers_are_left():
    def script(number, processes):
        in_reserve(processes)
        if number == 1:
            raise Dies
        try:
            state_of(processes)
        except WorkerError:
            assert processes._transport.lifetime.closed
            raise

    first, second, third = Job(3, workers=4, min_workers=3).run(script).values()
    assert isinstance(second, Dies)
    assert "2 workers are left, and min_workers=3: all stop.\n    workers 2, 3 lost: rank 1" in str(first)
    assert "the workers have stopped: all workers are lost, and with them the run's state" in str(third)
