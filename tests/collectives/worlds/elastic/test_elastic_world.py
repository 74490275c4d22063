"""Processes that work, wait on standby, join, leave and are lost, as threads with a stand-in for MPI."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

import pytest

from adaptive import Preempted, ReserveReleased, WorkerCountError, WorkerError
from adaptive.base.worker_slots import WorkerSlots
from collectives.worlds.elastic import elastic_world
from collectives.worlds.elastic.spawning import SpawnRequest
from collectives.worlds.transport.process_group import Process
from tests.collectives.worlds.mpi_of_threads import Killed
from tests.speed import limit

from .job_of_threads import ElasticJob


def polled(processes, workers):
    """Ask for so many workers, on rank 0 until those that are missing are ready."""
    missing = workers - len(processes.members)
    processes.request_workers(workers)
    if processes.transport.rank == 0:
        waited_for(lambda: processes.poll_ready() >= missing)
    assert processes.poll_ready() == (0 if processes.transport.rank else missing)
    return processes


def waited_for(fact):
    """Wait for what processes on standby do meanwhile."""
    end = time.monotonic() + limit(2)
    while not fact():
        assert time.monotonic() < end
        time.sleep(0.001)


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
            assert processes.transport.rank == 3
            processes.wait(lambda: True)
        else:
            assert processes.poll_ready() == 0
            processes.begin_run()
            polled(processes, 6).change(6)
        assert (processes.members, processes.generation) == (tuple(range(6)), 2)
        assert (processes.transport.rank, processes.transport.completed) == (number, 0)
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
        assert not processes.in_reserve
        assert not processes.run_under_way
        assert processes.members == (0, 1, 2, 3)
        assert processes.needs_state_transfer
        transferred.append(state_of(processes))
        processes.end_run()  # nothing: no run is under way
        assert processes.transport.group.comm.size == 3
        assert processes.losses == ()
        return transferred

    sent = ("state", [])
    assert ElasticJob(3, workers=4).run(script) == {0: [None, None, None], 1: [None, sent, None], 2: [sent, sent]}


@pytest.fixture(autouse=True)
def ends(monkeypatch):
    """The ends of processes; a process in `noticed` has received a termination signal so many seconds ago."""
    found = SimpleNamespace(left=0, joined=0, acknowledged=0, followed=0, noticed={})

    def count(name):
        setattr(found, name, getattr(found, name) + 1)

    def leave_job():
        count("left")
        raise SystemExit(0)

    monkeypatch.setattr(elastic_world.ending, "leave_job", leave_job)
    report = lambda joined=False, left=False: count("joined" if joined else "followed")  # noqa: E731
    monkeypatch.setattr(elastic_world.ending, "report", report)
    monkeypatch.setattr(elastic_world, "acknowledge_termination", lambda: count("acknowledged"))
    notice = lambda: found.noticed.get(threading.current_thread().name)  # noqa: E731
    monkeypatch.setattr(elastic_world, "pending_termination", notice)
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
        processes.dismiss_reserve()  # nothing: no run is under way
        in_reserve(processes)
        processes.lifetime.terminated = terminated
        processes.dismiss_reserve()
        return processes.lifetime.closed

    first, second = ElasticJob(2, workers=2).run(script).values()
    assert first is False
    assert isinstance(second, ends_by)
    assert not getattr(second, "alone", False)
    assert ends.acknowledged == 1


def test_processes_on_standby_end_by_the_error_of_the_others():
    def script(number, processes):
        processes.fail("too early")  # nothing: no run is under way
        in_reserve(processes)
        processes.fail("it was too large")

    *_, second, third = ElasticJob(3, workers=2).run(script).values()
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

    first, second, third = ElasticJob(3).run(script).values()
    assert third == ((4, 5), False)
    assert str(first) == "it received a termination signal, and the others continue"
    assert str(second) == "it received a termination signal, and the others continue"
    assert isinstance(first, Preempted)
    assert first.alone
    assert ends.left == ends.acknowledged == 2


def test_survivors_go_on_without_lost_workers():
    def script(number, processes):
        if number == 1:
            raise Killed
        state_of(processes)
        assert processes.transport.group.comm.size == 3
        return processes.members, processes.generation, processes.most, processes.losses, processes.unowned_slots

    first, _, *others = ElasticJob(4).run(script).values()
    assert others == [first, first]
    members, generation, most, [loss], unowned = first
    assert (members, generation, most, unowned) == ((0, 1, 4, 5, 6, 7), 2, 6, (2, 3))
    assert str(loss) == "workers 2, 3 lost: rank 1 (pid 1 on a) disconnected in a step; 250 ms to repair."


@pytest.mark.parametrize(("devices", "left"), [(1, "1 worker is left"), (2, "2 workers are left")])
def test_survivors_end_if_too_few_workers_are_left(devices, left):
    def script(number, processes):
        in_reserve(processes)
        if number == 1:
            raise Killed
        try:
            state_of(processes)
        except WorkerError:
            assert processes.lifetime.closed
            raise

    job = ElasticJob(3, workers=2 * devices, min_workers=devices + 1, devices=devices)
    first, second, third = job.run(script).values()
    assert isinstance(second, Killed)
    assert f"{left}, and min_workers={devices + 1}: all stop.\n    worker" in str(first)
    assert "this process was on standby, and all workers are lost" in str(third)


def test_processes_on_standby_end_when_those_that_work_now_are_lost():
    def script(number, processes):
        in_reserve(processes)
        processes.change(2)
        if number == 0:
            raise Killed
        if number == 2:
            in_reserve(processes)
        waited_for(lambda: 2 in job.results)  # on standby, too, but alive

    job = ElasticJob(3, workers=4)
    assert isinstance(job.run(script)[2], WorkerError)


def test_a_worker_that_is_lost_in_a_rendezvous_is_a_loss_like_others():
    def script(number, processes):
        def dies(_operation):
            raise Killed

        if number == 1:
            processes.transport.collective = dies
        if not in_reserve(processes):
            processes.end_run()
        return processes.members, *map(str, processes.losses)

    first, _, third = ElasticJob(3, workers=4).run(script).values()
    lost = "workers 2, 3 lost: rank 1 (pid 1 on a) disconnected in a rendezvous of all processes."
    assert first == third == ((0, 1), lost)


def test_a_process_on_standby_that_is_not_ready_or_dead_does_not_join():
    asked = []

    def script(number, processes):
        def is_ready():
            asked.append(number)
            if number == 1:
                raise Killed
            return number == 2

        processes.begin_run()
        if number == 0:
            polled(processes, 6)  # the dead one counts, until all look
            processes.change(8)
            assert processes.most == 6  # with the one that is not ready
        else:
            processes.wait(is_ready)
        processes.dismiss_reserve()
        return processes.members, processes.losses, processes.unowned_slots

    first, _, third, fourth = ElasticJob(4, workers=2).run(script).values()
    assert first == third == ((0, 1, 4, 5), (), (2, 3, 6, 7))
    assert isinstance(fourth, ReserveReleased)
    assert asked.count(2) == 2
    assert asked.count(3) == 2  # at each rendezvous, and never before


def test_processes_on_standby_end_with_the_workers(ends):
    def script(number, processes):
        processes.begin_run()
        if number == 0:
            raise Killed
        try:
            processes.wait(lambda: True)
        finally:
            assert processes.lifetime.closed

    _, *others = ElasticJob(3, workers=2).run(script).values()
    for error in others:
        assert isinstance(error, WorkerError)
        assert "all workers are lost, and with them the state of the run" in str(error)
        assert "adaptive run --restarts 3" in str(error)
    assert ends.followed == 2


def test_processes_on_standby_end_in_the_same_way_if_an_operation_shows_that_the_workers_are_lost(ends):
    """Between two runs, or in the transfer of the last state."""

    def script(number, processes):
        if number == 0:
            raise Killed
        state_of(processes)

    _, error = ElasticJob(2, workers=2).run(script).values()
    assert "all workers are lost, and with them the state of the run" in str(error)
    assert ends.followed == 1


# --- termination signals ----------------------------------------------------------------------------------------------


def test_a_process_on_standby_leaves_when_it_is_terminated(ends):
    def script(number, processes):
        ends.noticed |= {"process 1": SimpleNamespace(seconds=0.0), "process 2": SimpleNamespace(seconds=1.0)}
        processes.begin_run()
        if number == 0:
            waited_for(lambda: ends.left)
            polled(processes, 4).change(4)
        else:
            processes.wait(lambda: True)
        return processes.members

    first, second, third = ElasticJob(3, workers=2).run(script).values()
    assert first == second == (0, 1, 2, 3)
    assert isinstance(third, Preempted)
    assert third.alone


def test_a_process_on_standby_stays_if_the_others_cannot_go_on_without_it(ends):
    def script(number, processes):
        ends.noticed["process 2"] = SimpleNamespace(seconds=1.0)
        in_reserve(processes)
        state_of(processes)
        processes.lifetime.terminated = True
        processes.dismiss_reserve()

    *_, third = ElasticJob(3, workers=4, survives=False).run(script).values()
    assert isinstance(third, Preempted)
    assert not third.alone
    assert ends.left == 0


# --- spawned processes ------------------------------------------------------------------------------------------------


def test_spawned_processes_join_one_by_one_and_together_and_are_replaced(ends):
    def script(number, processes):
        if number == 0:
            assert (processes.members, processes.most, processes.capacity) == ((0, 1), 6, 7)
            processes.begin_run()
            polled(processes, 6).change(6)
        else:
            assert processes.members == ((0, 1) if number < 3 else (0, 1, 4, 5))
            assert processes.in_reserve
            assert processes.run_under_way
            assert processes.transport.rank > 0
            processes.wait(lambda: True)
        if number < 3:
            assert processes.members == tuple(range(6))
            assert state_of(processes) == (("state", []) if number else None)
            if processes.workers == range(2, 4):
                raise Killed
            state_of(processes)
            assert (processes.members, processes.most) == ((0, 1, 4, 5), 6)
            assert processes.unowned_slots == (2, 3, 6)
            polled(processes, 6).change(6)
        assert processes.unowned_slots == (6,)
        assert state_of(processes) == (("state", []) if number == 3 else None)
        processes.end_run()
        return processes.workers[0], processes.transport.rank, processes.members, *processes.losses

    first, *two, last = ElasticJob(1, max_workers=7).run(script).values()
    assert {type(result) for result in two} == {Killed, tuple}
    results = [first, next(result for result in two if not isinstance(result, Killed)), last]
    assert [result[:-1] for result in results] == [(slot, n, tuple(range(6))) for n, slot in enumerate((0, 4, 2))]
    assert all(result[-1].workers == (2, 3) for result in results)
    assert ends.joined == 3


def test_processes_are_only_spawned_for_what_those_on_standby_lack():
    def script(number, processes):
        in_reserve(processes)
        if number == 0:
            polled(processes, 4).change(4)
            polled(processes, 6)
        processes.change(6)
        assert processes.members == tuple(range(6))
        processes.dismiss_reserve()

    assert list(ElasticJob(2, workers=2, max_workers=8).run(script)) == [0, 1, 2]


@pytest.mark.parametrize("end", ["not needed", "refused", "abandoned"])
def test_spawned_processes_that_do_not_join_end(ends, caplog, end):
    def script(number, processes):
        processes.begin_run()
        if number == 0:
            processes.request_workers(4)
            waited_for(lambda: processes.poll_ready() or processes.spawner.failed)
            if end == "abandoned":
                raise Killed
            processes.dismiss_reserve()
            return processes.spawner.failed
        try:
            processes.wait(lambda: True)
        finally:
            assert processes.lifetime.closed

    job = ElasticJob(1, max_workers=4, spawned_program={"driver": "b"} if end == "refused" else None)
    first, ended = job.run(script).values()
    assert isinstance(first, Killed) if end == "abandoned" else first == (end == "refused")
    assert isinstance(ended, SystemExit)
    assert (ends.left, ends.joined) == (1, 0)
    said = "a spawned process is not admitted: driver differs: a on the workers, b on the spawned process."
    assert (said in caplog.text) == (end == "refused")


@pytest.mark.parametrize("call", range(4))
def test_without_a_spawned_process_that_dies_while_it_is_admitted_the_others_go_on(call):
    def script(number, processes):
        processes.begin_run()
        if number == 1:
            processes.wait(lambda: True)
        polled(processes, 4).change(4)
        state_of(processes)
        return processes.members, processes.losses, processes.transport.group.comm.size

    job = ElasticJob(1, max_workers=4)
    job.dies = {1: call}
    first, second = job.run(script).values()
    assert first == ((0, 1), (), 1)
    assert isinstance(second, Killed)


# --- the start of a job -----------------------------------------------------------------------------------------------


def test_numbers_of_workers_that_are_not_possible():
    def script(number, processes): ...

    with pytest.raises(WorkerCountError, match=r"workers=3 is not possible.*nearest possible number is 2\."):
        ElasticJob(2, workers=3).run(script)
    for numbers in ({"workers": 5}, {"workers": 2, "min_workers": 3}, {"max_workers": 3}, {"min_workers": 5}):
        with pytest.raises(WorkerCountError):
            ElasticJob(2, **numbers).run(script)
    assert ElasticJob(2, workers=4, max_workers=4).run(script) == {0: None, 1: None}


@pytest.mark.parametrize(("node", "host"), [("here", 7), ("elsewhere", 4 + (1 << 20))])
def test_a_spawned_process_knows_its_host(monkeypatch, node, host):
    monkeypatch.setattr("platform.node", lambda: node)
    request = SpawnRequest(range(4, 6), WorkerSlots(6, 2), {"here": 7, "other": 8}, 5)
    assert request.group(None).everyone == (Process(range(4, 6), node, host, os.getpid()),)
