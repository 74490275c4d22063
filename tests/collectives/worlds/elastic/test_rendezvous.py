"""A rendezvous of one working process and a spawned one that may have died, with a stand-in for MPI."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from adaptive.base.worker_slots import WorkerSlots
from collectives.worlds.elastic.rendezvous import CHANGE, Attendee, RendezvousPlan, rendezvous
from collectives.worlds.transport.process_group import Process, ProcessGroup

WORKING = Process(range(1), "here", 0, 1)
SPAWNED = Process(range(1, 2), "here", 0, 2)


class Comm:
    """A communicator in which this process has rank 0. A spawned process is the last rank.

    Args:
      admits: whether the spawned process lives until it is admitted.
      spawned: whether it is in this communicator.
    """

    rank = 0

    def __init__(self, admits: bool, spawned: bool = False):
        self._admits, self._spawned, self.size, self.revoked = admits, spawned, 1 + spawned, False

    def Set_errhandler(self, _handler: Any) -> None: ...

    def Shrink(self) -> Comm:
        return Comm(self._admits)

    def Agree(self, flag: int) -> int:
        return flag

    def Revoke(self) -> None:
        self.revoked = True

    def Create_intercomm(self, *_: Any) -> Any:
        if not self._admits:
            raise OSError("the spawned process has died")
        return SimpleNamespace(Merge=lambda high: Comm(True, spawned=True))

    def allgather(self, role: Attendee) -> list[Attendee]:
        if self.revoked:
            raise OSError("revoked")
        spawned = Attendee(SPAWNED, rank=-1, ready=True)
        return [role, spawned] if self._spawned else [role]

    def bcast(self, plan: RendezvousPlan, _root: int) -> RendezvousPlan:
        return plan

    def Split(self, *_: Any) -> Comm:
        return self


def met_by(admits: bool) -> Any:
    """Return the result of a rendezvous that admits a spawned process."""

    def plan(job: ProcessGroup, roles: Any) -> RendezvousPlan:
        return RendezvousPlan(CHANGE, tuple(range(len(roles))), WorkerSlots(2), ())

    mpi = SimpleNamespace(ERRORS_RETURN=None, ERR_PROC_FAILED=1, UNDEFINED=-1, COMM_NULL=None, Exception=OSError)
    spawned = SimpleNamespace(pair=None, messages=SimpleNamespace(send=lambda *_: None))
    role = Attendee(WORKING, rank=0, ready=True, spawned=1)
    job = ProcessGroup(Comm(admits), (WORKING,))
    return rendezvous(mpi, job, role, plan, survives=True, spawned=[spawned])


@pytest.mark.parametrize(("admits", "met"), [(True, (WORKING, SPAWNED)), (False, (WORKING,))])
def test_without_a_spawned_process_that_dies_while_it_is_admitted_the_others_go_on(admits, met):
    assert met_by(admits)[1].everyone == met
