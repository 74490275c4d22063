"""Spawned processes in the view of rank 0, with a stand-in for MPI."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from collectives.worlds.elastic.spawning import Spawner, SpawnRequest
from collectives.worlds.elastic.standby import ASK, READY


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
        return SimpleNamespace(size=int(self.is_dead), Translate_ranks=lambda *_: [1])

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
        spawner.spawn(SpawnRequest(range(slot, slot + 1), 3, (0,), {}))
    for thread in threading.enumerate():
        if thread.name == "adaptive-spawn":
            thread.join()


def test_after_a_process_that_has_built_something_else_no_more_are_spawned():
    spawner = spawner_of(lambda: None)
    spawned_for(spawner, 1)
    assert not spawner.ready({"driver": "of rank 0"})
    assert spawner.failed
    assert spawner.has(range(1, 2))  # nor in its place


def test_a_process_that_has_died_is_replaced_twice():
    spawner = spawner_of(lambda: None)
    for deaths in (1, 2, 3):
        spawned_for(spawner, 1)
        spawner._take_new()
        spawner._spawned[0].pair.is_dead = True
        assert not spawner.ready({})
        assert not spawner.has(range(1, 2))
        assert spawner.failed == (deaths == 3)


def test_a_process_that_arrives_while_the_others_are_looked_at_is_not_lost():
    spawner = spawner_of(lambda: spawner.ready({}))
    spawned_for(spawner, 1, 2)
    found = spawner.ready({})
    assert sorted(spawned.worker_slots[0] for spawned in found) == [1, 2]
    spawner.admitted(found)
    assert not spawner.has(range(1, 2))
    assert not spawner.ready({})
