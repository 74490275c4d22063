"""Processes that work, wait on standby, join, leave and are lost, as threads with a stand-in for MPI."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from adaptive import Preempted, ReserveReleased, WorkerError
from collectives.worlds.elastic import elastic_processes
from tests.speed import limit

from .job_of_threads import Dies, Job

COVERS = (
    "collectives/worlds/elastic/processes_of_job.py",
    "collectives/worlds/elastic/rendezvous.py",
    "collectives/worlds/elastic/spawning.py",
    "collectives/worlds/elastic/standby.py",
)


def polled(processes, workers):
    """Ask for so many workers, on rank 0 until those that are missing are ready."""
    missing = workers - len(processes.members)
    processes.request_workers(workers)
    if processes._transport.rank == 0:
        waited_for(lambda: processes.poll_ready() >= missing)
    assert processes.poll_ready() == (0 if processes._transport.rank else missing)
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


def test_a_process_on_standby_that_is_not_ready_or_dead_does_not_join():
    asked = []

    def script(number, processes):
        def is_ready():
            asked.append(number)
            if number == 1:
                raise Dies
            return number == 2

        processes.begin_run()
        if number == 0:
            polled(processes, 6)  # the dead one counts, until all look
            processes.change(8)
            assert processes.most == 6  # with the one that is not ready
        else:
            processes.wait(is_ready)
        assert processes._transport.confirmed == 1
        processes.dismiss()
        return processes.members, processes.losses, processes.unowned_slots

    first, _, third, fourth = Job(4, workers=2).run(script).values()
    assert first == third == ((0, 1, 4, 5), (), (2, 3, 6, 7))
    assert isinstance(fourth, ReserveReleased)
    assert asked.count(2) == 2
    assert asked.count(3) == 2  # at each rendezvous, and never before


def test_no_more_processes_are_asked_than_are_missing():
    asked = []

    def script(number, processes):
        processes.begin_run()
        if number == 0:
            polled(processes, 4).change(4)
        else:
            processes.wait(lambda: asked.append(number) or True)
        processes.dismiss()

    Job(3, workers=2, max_workers=8).run(script)
    assert (asked.count(1), asked.count(2)) == (2, 2)  # at each rendezvous, and one when it was asked


class Copies:
    """The copies that a process holds."""

    def __init__(self, newest=-1, has_place=True):
        self.newest, self.has_place, self.created = lambda: newest, lambda: has_place, []

    def create(self, make):
        self.created.append(make([8, 9]))


def test_processes_on_standby_take_over_from_the_newest_copy():
    def script(number, processes):
        processes.copies = Copies({2: 5, 3: 7, 4: 6}.get(number, -1))
        processes.begin_run()
        if number < 2:
            raise Dies
        processes.wait(lambda: number == 4)
        assert processes.members == (6, 7, 8, 9)
        assert processes.known_before_take_over == (0 if number == 3 else None)
        assert [loss.workers for loss in processes.losses] == [(0, 1), (2, 3)]
        assert processes.generation > 1 << 32
        assert processes.needs_state_transfer
        rank, sent = processes._transport.rank, state_of(processes)
        assert processes.known_before_take_over is None
        processes.dismiss()
        return rank, sent

    _, _, third, fourth, fifth = Job(5, workers=4).run(script).values()
    assert (fourth, fifth) == ((0, None), (1, ("state", [])))
    assert isinstance(third, ReserveReleased)


@pytest.mark.parametrize(("survives", "copies"), [(True, None), (True, Copies())])
def test_without_a_copy_processes_on_standby_end_with_the_workers(survives, copies):
    def script(number, processes):
        processes.copies = copies
        processes.begin_run()
        if number == 0:
            raise Dies
        try:
            processes.wait(lambda: True)
        finally:
            assert processes._transport.lifetime.closed

    _, *others = Job(3, workers=2, survives=survives).run(script).values()
    assert all("all workers are lost, and with them the run's state" in str(error) for error in others)


@pytest.mark.parametrize("places", [(True, True, False), (True, True, True), (None, True, False)])
def test_places_for_copies_are_created_if_a_process_has_none(places):
    def script(number, processes):
        processes.copies = None if places[number] is None else Copies(has_place=places[number])
        in_reserve(processes)
        if number < 2:
            polled(processes, 6).change(6)
        created = processes.copies and processes.copies.created
        processes.end_run()
        assert created == (processes.copies and processes.copies.created)  # not at the end of a run
        return created

    created = [(3, [8, 9])] if places == (True, True, False) else []
    results = Job(3, workers=4).run(script)
    assert results == {n: None if place is None else created for n, place in enumerate(places)}


# --- termination signals ----------------------------------------------------------------------------------------------


def test_a_process_on_standby_leaves_when_it_is_terminated(ends):
    def script(number, processes):
        ends.noticed["process 2"] = SimpleNamespace(seconds=1.0)
        processes.begin_run()
        if number == 0:
            assert not processes.poll_reserve_terminating()
        else:
            processes.wait(lambda: True)
        if number == 0:
            waited_for(lambda: ends.left)
            assert not processes.poll_reserve_terminating()
            polled(processes, 4).change(4)
        return processes.members

    first, second, third = Job(3, workers=2).run(script).values()
    assert first == second == (0, 1, 2, 3)
    assert isinstance(third, Preempted) and third.alone


def test_all_processes_end_if_they_cannot_go_on_without_one_on_standby(ends):
    def script(number, processes):
        ends.noticed["process 2"] = SimpleNamespace(seconds=1.0)
        in_reserve(processes)
        if number == 0:
            waited_for(processes.poll_reserve_terminating)
        state_of(processes)
        assert processes.poll_reserve_terminating() == (number == 0)
        processes._transport.lifetime.terminated = True
        processes.dismiss()

    first, second, third = Job(3, workers=4, survives=False).run(script).values()
    assert isinstance(third, Preempted) and not third.alone
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
            assert processes.in_reserve and processes.run_under_way
            assert processes._transport.rank > 0
            processes.wait(lambda: True)
        if number < 3:
            assert processes.members == tuple(range(6))
            assert state_of(processes) == (("state", []) if number else None)
            if processes.workers == range(2, 4):
                raise Dies
            state_of(processes)
            assert (processes.members, processes.most) == ((0, 1, 4, 5), 6)
            assert processes.unowned_slots == (2, 3, 6)
            polled(processes, 6).change(6)
        assert processes.unowned_slots == (6,)
        assert state_of(processes) == (("state", []) if number == 3 else None)
        processes.end_run()
        return processes.workers[0], processes._transport.rank, processes.members, *processes.losses

    first, *two, last = Job(1, max_workers=7).run(script).values()
    assert {type(result) for result in two} == {Dies, tuple}
    results = [first, next(result for result in two if not isinstance(result, Dies)), last]
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
        processes.dismiss()

    assert list(Job(2, workers=2, max_workers=8).run(script)) == [0, 1, 2]


@pytest.mark.parametrize("program", [{"driver": "a"}, {"driver": "b"}])
def test_spawned_processes_that_do_not_join_end(ends, program):
    def script(number, processes):
        processes.begin_run()
        if number == 0:
            processes.request_workers(4)
            waited_for(lambda: processes.poll_ready() or processes.spawner.failed)
            processes.dismiss()
            return processes.spawner.failed
        try:
            processes.wait(lambda: True)
        finally:
            assert processes._transport.lifetime.closed

    refused, ended = Job(1, max_workers=4, spawned_program=program).run(script).values()
    assert refused == (program == {"driver": "b"})
    assert isinstance(ended, SystemExit)
    assert (ends.left, ends.joined) == (1, 0)
