"""Processes that are spawned while a job runs: to replace those that were lost, or because more workers are asked for.

The process with rank 0 spawns them, in a thread, while all go on: it takes a second or two, and some more until the new
one has imported what the script imports, and built its program. A *recruit* runs the same command as the others, finds
on the way who has spawned it, and waits like those in reserve, but by words in a communicator of the two. It has to say
what it has built; if that is what the others have built, it is let in at a meeting (`admitted`), and is one of the job.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from collectives.worlds.transport.process_group import Process
from launchers.ending import RECRUIT, leave_job

from .standby import ASK, CLOSED, READY, REFUSED, ControlMessages

_OFFER_TAG, _MERGE_TAG = 7102, 7103
_log = logging.getLogger("adaptive")


class SpawnRequest(NamedTuple):
    """What a recruit is told when it makes its world."""

    seats: range  # its own
    capacity: int  # of the world
    members: tuple[int, ...]
    hosts: Mapping[str, int]  # numbers of the hosts' names


class SpawnedProcess:
    """One that was spawned, as the process knows it that has spawned it. It is rank 1 of the pair."""

    def __init__(self, mpi: Any, pair: Any, seats: range):
        self.pair, self.seats = pair, seats
        self.words = ControlMessages(mpi, pair)
        self.ready = self.over = False
        self.words.send([1], ASK)

    def listen(self, build_digests: Mapping[str, str]) -> None:
        """Hear whether it is ready, and what it has built; refuse it if that is something else."""
        if self.words.dead([1]):
            self.over = True
        heard = self.words.heard()
        if heard is None or heard[0] != READY:
            return
        differs = [name for name in build_digests if heard[1].get(name) != build_digests[name]]
        if not differs:
            self.ready = True
            return
        self.over = True
        name = differs[0]
        theirs, own = heard[1].get(name), build_digests[name]
        text = f"{name} is not the same: the workers have {own}, and a process that was spawned has {theirs}"
        _log.error("a process was not let in: %s. Spawned processes run the command that the job was started by.", text)
        self.words.send([1], REFUSED, text)


class Spawner:
    """What the process with rank 0 does to have more processes."""

    def __init__(self, mpi: Any):
        self._mpi = mpi
        self.all: list[SpawnedProcess] = []
        self._coming: list[threading.Thread] = []
        self._taken: set[int] = set()  # seats of those who come
        self.failed = False

    def spawn(self, offer: SpawnRequest) -> None:
        """Have a process come, for these seats. Does not wait for it."""
        self._taken |= set(offer.seats)
        thread = threading.Thread(target=self._spawn, args=(offer,), name="adaptive-spawn", daemon=True)
        self._coming.append(thread)
        thread.start()

    def _spawn(self, offer: SpawnRequest) -> None:
        mpi = self._mpi
        try:
            info = mpi.Info.Create()
            info.Set("PMIX_ENVAR", f"{RECRUIT}=1")
            command, *arguments = sys.orig_argv
            both = mpi.COMM_SELF.Spawn(command, arguments, 1, info)
            pair = both.Merge(high=False)
            pair.Set_errhandler(mpi.ERRORS_RETURN)
            pair.send(offer, 1, _OFFER_TAG)
            self.all.append(SpawnedProcess(mpi, pair, offer.seats))
        except mpi.Exception as error:
            self.failed = True
            _log.error(
                "no process could be spawned for worker %d: %s. It needs a free place, and cores that no rank is bound "
                "to:  adaptive run --oversubscribe --bind-to none …", offer.seats[0], error.Get_error_string()
            )  # fmt: skip

    def ready(self, build_digests: Mapping[str, str]) -> list[SpawnedProcess]:
        """Those who can be let in."""
        for recruit in self.all:
            if not recruit.ready and not recruit.over:
                recruit.listen(build_digests)
        for recruit in self.all:
            if recruit.over:
                self.failed = True
        self.all = [recruit for recruit in self.all if not recruit.over]
        return [recruit for recruit in self.all if recruit.ready]

    def has(self, seats: range) -> bool:
        """Whether somebody comes for these seats."""
        return seats[0] in self._taken

    def let_in(self, recruits: Sequence[SpawnedProcess]) -> None:
        """These are recruits no more."""
        self.all = [recruit for recruit in self.all if recruit not in recruits]
        for recruit in recruits:
            self._taken -= set(recruit.seats)

    def dismiss(self) -> None:
        """Nobody is needed any more."""
        for recruit in self.all:
            recruit.words.send([1], CLOSED)


def recruited(mpi: Any, environ: Mapping[str, str] = os.environ) -> tuple[Any, SpawnRequest] | None:
    """Of a recruit, its communicator with whoever has spawned it, and what that one offers; `None` in others."""
    if RECRUIT not in environ or mpi.Comm.Get_parent() == mpi.COMM_NULL:
        return None
    parent = mpi.Comm.Get_parent()
    parent.Set_errhandler(mpi.ERRORS_RETURN)
    try:
        pair = parent.Merge(high=True)
        pair.Set_errhandler(mpi.ERRORS_RETURN)
        return pair, pair.recv(source=0, tag=_OFFER_TAG)
    except mpi.Exception:  # whoever has spawned it is gone, and nobody else knows of it
        leave_job()


def merged(mpi: Any, everyone: Any, first: int, pair: Any) -> Any:
    """Let a recruit in: a communicator of all and the recruit, which has the last rank.

    Args:
      first: the rank of the process that has spawned it, and `pair` its communicator with the recruit; else `None`.
    """
    remote = 1 if everyone.rank == first else 0
    both = everyone.Create_intercomm(first, pair if everyone.rank == first else mpi.COMM_SELF, remote, _MERGE_TAG)
    joined = both.Merge(high=False)
    joined.Set_errhandler(mpi.ERRORS_RETURN)
    return joined


def entered(mpi: Any, pair: Any) -> Any:
    """The same, of the recruit."""
    both = mpi.COMM_SELF.Create_intercomm(0, pair, 0, _MERGE_TAG)
    joined = both.Merge(high=True)
    joined.Set_errhandler(mpi.ERRORS_RETURN)
    return joined


def as_process(offer: SpawnRequest, node: str) -> Process:
    """A recruit, as the others will know it."""
    return Process(offer.seats, node, offer.hosts.get(node, offer.seats[0] + (1 << 20)), os.getpid())
