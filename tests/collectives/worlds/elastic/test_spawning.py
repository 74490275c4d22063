"""Spawned processes in the view of rank 0, with a stand-in for MPI."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from adaptive.base.worker_slots import WorkerSlots
from collectives.worlds.elastic import spawning
from collectives.worlds.elastic.spawning import Spawner, SpawnRequest, receive_spawn_request
from collectives.worlds.elastic.standby import ASK, READY
from launchers.ending import SPAWNED


class Pair:
    """The communicator with a spawned process that is always ready.

    Args:
      asked: called while the process is being asked.
    """

    group = SimpleNamespace()

    def __init__(self, asked: Any):
        self._asked, self._answers, self.is_dead = asked, 0, False

    def Set_errhandler(self, _handler: Any) -> None: ...

    def Get_failed(self) -> Any:
        return SimpleNamespace(size=int(self.is_dead), Translate_ranks=lambda *_: [1], Free=lambda: None)

    def send(self, _request: Any, _rank: int, _tag: int) -> None: ...

    def isend(self, message: tuple[str, Any], _rank: int, _tag: int) -> None:
        if message[0] == ASK:
            self._answers += 1
            self._asked()

    def Iprobe(self, *_: Any) -> bool:
        return self._answers > 0

    def recv(self, **_: Any) -> tuple[str, dict[str, str]]:
        self._answers -= 1
        return READY, {}


def spawner_of(asked: Any) -> Spawner:
    """Return a spawner whose processes are ready at once."""
    comm_self = SimpleNamespace(Spawn=lambda *_: SimpleNamespace(Merge=lambda high: Pair(asked)))
    mpi = SimpleNamespace(
        COMM_SELF=comm_self,
        Info=SimpleNamespace(Create=lambda: SimpleNamespace(Set=lambda *_: None)),
        Status=lambda: SimpleNamespace(source=1),
        ERRORS_RETURN=None,
        ANY_SOURCE=-1,
        Exception=OSError,
    )
    return Spawner(mpi)


def spawned_for(spawner: Spawner, *slots: int) -> None:
    """Spawn a process for each of these worker slots, and wait until they are there."""
    for slot in slots:
        spawner.spawn(SpawnRequest(range(slot, slot + 1), WorkerSlots(3, 1), {}, 0))
    for thread in threading.enumerate():
        if thread.name == "adaptive-spawn":
            thread.join()


def dies(spawner: Spawner) -> None:
    """Spawn a process that dies before it is admitted."""
    spawned_for(spawner, 1)
    spawner._spawned[1].pair.is_dead = True
    assert not spawner.ready({})
    assert not spawner.has(range(1, 2))


def test_deaths_count_since_a_process_was_admitted():
    spawner = spawner_of(lambda: None)
    for _ in range(3):
        dies(spawner)
        dies(spawner)
        spawner.admitted([])  # of a rendezvous without a spawned process
        spawned_for(spawner, 1)
        spawner.admitted(spawner.ready({}))
    dies(spawner)
    spawner.admitted([])
    dies(spawner)
    assert not spawner.failed
    dies(spawner)
    assert spawner.failed


def test_without_a_free_slot_of_the_launcher_no_more_are_spawned(caplog):
    class Refused(OSError):
        def Get_error_string(self) -> str:
            return "no slot"

    def spawn(*_: Any) -> None:
        raise Refused

    spawner = spawner_of(lambda: None)
    spawner._mpi.COMM_SELF.Spawn = spawn
    spawned_for(spawner, 2)
    assert spawner.failed
    assert "no process could be spawned for worker 2: no slot." in caplog.text


@pytest.mark.parametrize(("environ", "parent"), [({}, True), ({SPAWNED: "1"}, False), ({SPAWNED: "1"}, True)])
def test_a_process_that_was_not_spawned_has_no_request(environ, parent):
    pair = SimpleNamespace(Set_errhandler=lambda _: None, recv=lambda source, tag: ("request", source))
    found = SimpleNamespace(Set_errhandler=lambda _: None, Merge=lambda high: pair) if parent else None
    mpi = SimpleNamespace(COMM_NULL=None, ERRORS_RETURN=None, Comm=SimpleNamespace(Get_parent=lambda: found))
    mpi.Exception = OSError
    assert receive_spawn_request(mpi, environ) == ((pair, ("request", 0)) if environ and parent else None)


def test_a_spawned_process_whose_spawner_has_ended_leaves(monkeypatch):
    def fails(_high: bool) -> None:
        raise OSError

    left = []
    monkeypatch.setattr(spawning, "leave_job", lambda: left.append(True))
    found = SimpleNamespace(Set_errhandler=lambda _: None, Merge=lambda high: fails(high))
    mpi = SimpleNamespace(COMM_NULL=None, ERRORS_RETURN=None, Comm=SimpleNamespace(Get_parent=lambda: found))
    mpi.Exception = OSError
    receive_spawn_request(mpi, {SPAWNED: "1"})
    assert left == [True]


def test_a_process_that_arrives_while_the_others_are_looked_at_is_not_lost():
    spawner = spawner_of(lambda: spawner.ready({}))
    spawned_for(spawner, 1, 2)
    found = spawner.ready({})
    assert sorted(spawned.worker_slots[0] for spawned in found) == [1, 2]
    spawner.admitted(found)
    assert not spawner.has(range(1, 2))
    assert not spawner.ready({})
