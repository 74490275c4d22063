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
        self._asked, self._answers = asked, 0

    def Set_errhandler(self, _handler: Any) -> None: ...

    def Get_failed(self) -> Any:
        return SimpleNamespace(size=0)

    def send(self, _request: Any, _rank: int, _tag: int) -> None: ...

    def isend(self, message: tuple[str, Any], _rank: int, _tag: int) -> None:
        assert message[0] == ASK
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


def test_a_process_that_arrives_while_the_others_are_looked_at_is_not_lost():
    spawner = spawner_of(lambda: spawner.ready({}))
    for slot in (1, 2):
        spawner.spawn(SpawnRequest(range(slot, slot + 1), 3, (0,), {}))
    for thread in threading.enumerate():
        if thread.name == "adaptive-spawn":
            thread.join()
    found = spawner.ready({})
    assert sorted(spawned.worker_slots[0] for spawned in found) == [1, 2]
    spawner.admitted(found)
    assert not spawner.has(range(1, 2))
    assert not spawner.ready({})
