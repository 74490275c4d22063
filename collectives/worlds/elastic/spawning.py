"""Processes that are spawned during a run, to replace lost ones or to add workers.

Rank 0 spawns them in a thread, while steps continue. That takes a second or two, and more until the new process has
imported the script's modules and built its program. A spawned process runs the same command as the others, and waits
on standby. It exchanges control messages with the process that spawned it, in a communicator of the two. It sends
digests of its program; if they match, it is admitted at a rendezvous (`merge_in`) and becomes part of the job.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from adaptive.base.worker_slots import WorkerSlots
from collectives.worlds.transport.process_group import Process, ProcessGroup
from launchers.ending import SPAWNED, leave_job

from .standby import ASK, DISMISSED, READY, ControlMessages

_REQUEST_TAG, _MERGE_TAG = 7102, 7103
_MOST_DEATHS = 3  # of spawned processes in a row
_log = logging.getLogger("adaptive")


class SpawnRequest(NamedTuple):
    """The message that a spawned process receives when it creates its world."""

    own: range  # its worker slots
    worker_slots: WorkerSlots  # those of the world
    hosts: Mapping[str, int]  # host numbers by host name
    world_number: int  # see `MPITransport`

    def group(self, comm: Any) -> ProcessGroup:
        """Return the group of this spawned process alone; `comm`: its communicator."""
        node = platform.node()
        unknown = self.own[0] + (1 << 20)
        return ProcessGroup(comm, (Process(self.own, node, self.hosts.get(node, unknown), os.getpid()),))


class SpawnedProcess:
    """A spawned process, in the view of the process that spawned it. It is rank 1 of `pair`."""

    def __init__(self, mpi: Any, pair: Any, worker_slots: range):
        self.pair, self.worker_slots = pair, worker_slots
        self.messages = ControlMessages(mpi, pair)
        self.digests: Mapping[str, str] | None = None  # of what it has built, once it is ready
        self.messages.send([1], ASK)

    def differs(self, build_digests: Mapping[str, str]) -> str:
        """Return how its program differs from that of the workers; "" if it does not, or is not built."""
        theirs = build_digests if self.digests is None else self.digests
        found = ((name, own, theirs.get(name)) for name, own in build_digests.items() if theirs.get(name) != own)
        return next((f"{n} differs: {own} on the workers, {it} on the spawned process" for n, own, it in found), "")


class Spawner:
    """The spawned processes that are not admitted yet; used by rank 0."""

    def __init__(self, mpi: Any):
        self._mpi = mpi
        self._spawned: dict[int, SpawnedProcess | None] = {}  # by first worker slot; None while it is being spawned
        self._deaths = 0  # in a row, before they were admitted
        self.failed = False  # no more are spawned: one could not be or was refused, or several in a row have died

    def has(self, worker_slots: range) -> bool:
        """Return whether a process is being spawned, or waits, for these worker slots."""
        return worker_slots[0] in self._spawned

    def spawn(self, request: SpawnRequest) -> None:
        """Start to spawn a process, in a thread."""
        self._spawned[request.own[0]] = None
        threading.Thread(target=self._spawn, args=(request,), name="adaptive-spawn", daemon=True).start()

    def _spawn(self, request: SpawnRequest) -> None:
        mpi = self._mpi
        try:
            info = mpi.Info.Create()
            info.Set("PMIX_ENVAR", f"{SPAWNED}=1")
            command, *arguments = sys.orig_argv
            both = mpi.COMM_SELF.Spawn(command, arguments, 1, info)
            pair = both.Merge(high=False)
            pair.Set_errhandler(mpi.ERRORS_RETURN)
            pair.send(request, 1, _REQUEST_TAG)
            self._spawned[request.own[0]] = SpawnedProcess(mpi, pair, request.own)
        except mpi.Exception as error:
            self.failed = True
            _log.error(
                "no process could be spawned for worker %d: %s. Spawning needs a free slot of the launcher:  "
                "adaptive run --oversubscribe …",
                *(request.own[0], error.Get_error_string()),
            )

    def ready(self, build_digests: Mapping[str, str]) -> list[SpawnedProcess]:
        """Return the processes that can be admitted. Receives their messages, and forgets those that will not join."""
        found = []
        for spawned in [spawned for spawned in list(self._spawned.values()) if spawned is not None]:
            message = spawned.messages.receive()
            if message is not None and message[0] == READY:
                spawned.digests = message[1]
            if spawned.messages.dead([1]):
                del self._spawned[spawned.worker_slots[0]]
                self._deaths += 1
                self.failed |= self._deaths == _MOST_DEATHS
                text = "no more are spawned" if self.failed else "another one is spawned in its place"
                _log.warning("a spawned process has died before it joined; %s.", text)
            elif differs := spawned.differs(build_digests):
                del self._spawned[spawned.worker_slots[0]]
                self.failed = True
                advice = "Spawned processes run the command that started the job."
                _log.error("a spawned process is not admitted: %s. %s", differs, advice)
                spawned.messages.send([1], DISMISSED)
            elif spawned.digests is not None:
                found.append(spawned)
        return found

    def admitted(self, spawned: Sequence[SpawnedProcess]) -> None:
        """Forget these processes: they are part of the job."""
        self._deaths = 0 if spawned else self._deaths
        for one in spawned:
            del self._spawned[one.worker_slots[0]]

    def dismiss(self) -> None:
        """Release all processes that are not admitted yet: the job is over."""
        for spawned in list(self._spawned.values()):
            if spawned is not None:
                spawned.messages.send([1], DISMISSED)


def receive_spawn_request(mpi: Any, environ: Mapping[str, str] = os.environ) -> tuple[Any, SpawnRequest] | None:
    """Return the communicator with the process that spawned this one, and its request; None if it was not spawned."""
    if SPAWNED not in environ or mpi.Comm.Get_parent() == mpi.COMM_NULL:
        return None
    parent = mpi.Comm.Get_parent()
    parent.Set_errhandler(mpi.ERRORS_RETURN)
    try:
        pair = parent.Merge(high=True)
        pair.Set_errhandler(mpi.ERRORS_RETURN)
        return pair, pair.recv(source=0, tag=_REQUEST_TAG)
    except mpi.Exception:  # the process that spawned this one has ended, and no other process knows this one
        leave_job()


def merge_in(mpi: Any, everyone: Any, first: int, pair: Any) -> Any:
    """Admit a process that rank `first` has spawned, and shares `pair` with; collective. Returns a communicator of all,
    in which the spawned process has the last rank.
    """
    remote = 1 if everyone.rank == first else 0
    both = everyone.Create_intercomm(first, pair if everyone.rank == first else mpi.COMM_SELF, remote, _MERGE_TAG)
    joined = both.Merge(high=False)
    joined.Set_errhandler(mpi.ERRORS_RETURN)
    return joined


def enter(mpi: Any, pair: Any, later: tuple[int, int]) -> Any:
    """Return the communicator of all, on a spawned process that `merge_in` admits. `later`: the rank of the process
    that spawned it, and the number of processes that are admitted after this one.
    """
    both = mpi.COMM_SELF.Create_intercomm(0, pair, 0, _MERGE_TAG)
    everyone = both.Merge(high=True)
    everyone.Set_errhandler(mpi.ERRORS_RETURN)
    first, number = later
    for _ in range(number):
        everyone = merge_in(mpi, everyone, first, None)
    return everyone
