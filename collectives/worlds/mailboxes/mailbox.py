"""The mailbox of a world of several processes: each process has memory from which the others copy at any time.

Each worker publishes to its place in its process's memory (`seqlock.py`). Processes of the same host copy from there
(`memory.py`), so a process that is slow, stopped or dead delays no other. Processes of other hosts ask a thread of the
owner (`serving.py`), with a short timeout (`fetching.py`). MPI's one-sided communication is not used between hosts,
because there it needs the owner's cooperation: Open MPI 5.0.11 waits forever for a lost host, and delivers only while
the owner polls, which costs a busy host a time slice per poll.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np

from adaptive.base.mailbox import Vectors
from collectives.worlds.transport.operations import Operation
from collectives.worlds.transport.process_group import Process

from .fetching import AnswerTimeout, BufferPool, OwnerConnection, most_likely_first
from .memory import Files, Memory, Windows
from .seqlock import SlotLayout
from .serving import MailboxEndpoint, MailboxServer, PublishedCopies

_KIND = crc32(b"mailbox")
_COMPONENT = "OMPI_MCA_osc"


def prepare_environment(environ: MutableMapping[str, str] = os.environ) -> None:
    """Exclude MPI's network components if all ranks are on one host, because without a network each rank prints their
    errors. Call before MPI is loaded.
    """
    ranks = environ.get("OMPI_COMM_WORLD_SIZE")
    if ranks is not None and ranks == environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"):
        environ.setdefault(_COMPONENT, "^ucx")


def why_none(mpi: Any) -> str:
    """Return why there can be no mailbox under this MPI, or "" if there can be one."""
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return (
            "MPI was initialized for one thread at a time, but kernels publish from XLA's threads. Do not set "
            "mpi4py.rc.thread_level: by default mpi4py requests MPI.THREAD_MULTIPLE"
        )
    return ""


class CreateMailbox(Operation):
    """The operation that creates a mailbox, `result`, for the processes of the group.

    Args:
      about: description of the operation, for errors.
      nbytes: sizes of the vectors that each worker publishes.
      everyone: returns those processes, by rank.
      service: returns the server of this process.
      outdated: the mailbox that the new one replaces.
      mpi: the module `mpi4py.MPI` to hold the mailbox in MPI windows; None for shared files.
    """

    agreed = True

    def __init__(
        self,
        about: str,
        nbytes: Sequence[int],
        everyone: Callable[[], Sequence[Process]],
        service: Callable[[], MailboxServer],
        outdated: ProcessMailbox | None,
        mpi: Any = None,
    ):
        super().__init__(about, "", crc32(repr(tuple(nbytes)).encode(), _KIND), f"a mailbox of {tuple(nbytes)} bytes")
        self._nbytes, self._everyone, self._service = nbytes, everyone, service
        self._outdated, self._mpi = outdated, mpi
        self.result: Any = None

    def carry_out(self, comm: Any) -> None:
        everyone = self._everyone()
        if self._outdated is not None:
            self._outdated.stop()
        layout, own = SlotLayout(self._nbytes), everyone[comm.rank]
        here = [rank for rank, process in enumerate(everyone) if process.host == own.host]
        size = len(own.worker_slots) * layout.place
        memory: Memory
        if self._mpi is not None:
            self._free_outdated(comm, everyone)
            memory = Windows(self._mpi, comm, here, size)
        else:
            with closing(Files(size)) as memory:
                addresses = comm.allgather(memory.address)
                memory.open(comm.rank, {rank: addresses[rank] for rank in here})
                comm.allgather(None)
        self.result = ProcessMailbox(layout, memory, everyone, comm.rank)
        if self._mpi is None or len(here) < len(everyone):
            self.result.ask(comm.allgather(self.result.shown_by(self._service())))

    def _free_outdated(self, comm: Any, everyone: Sequence[Process]) -> None:
        """Free the outdated mailbox if all processes have the same one; those that were on standby may not."""
        names = set(comm.allgather(None if self._outdated is None else self._outdated.name))
        if self._outdated is not None and len(names) == 1:
            self._outdated.free_among(everyone)


class ProcessMailbox:
    """A mailbox with a place for each worker in the memory of its process: see `Mailbox`.

    Args:
      layout: layout of the memory of a process.
      memory: the memory of this process, and of others where it is accessible.
      everyone: the processes that have created the mailbox, by rank.
      own: this process's rank.
    """

    def __init__(self, layout: SlotLayout, memory: Memory, everyone: Sequence[Process], own: int):
        self._layout, self._memory, self._everyone, self._own = layout, memory, tuple(everyone), own
        self._where = {slot: (rank, i) for rank, p in enumerate(everyone) for i, slot in enumerate(p.worker_slots)}
        slots = everyone[own].worker_slots
        self._rooms = {reader: BufferPool(layout.slot) for reader in slots}
        self._current: dict[int, np.ndarray] = {}  # the latest result of each reader
        self._links: dict[tuple[int, int], OwnerConnection] = {}  # by reader and rank
        self._shown: PublishedCopies | None = None
        self._writing = threading.Lock()

    def shown_by(self, service: MailboxServer) -> MailboxEndpoint:
        """Serve the vectors of this process's workers to other processes. Returns the endpoint for their requests."""
        self._shown = PublishedCopies(self._layout, partial(self._memory.copy, self._own), self._writing)
        return service.show(self._shown)

    def ask(self, owners: Sequence[MailboxEndpoint]) -> None:
        """Set the endpoints of all processes, by rank; used for those whose memory is not accessible here."""
        patience: dict[int, AnswerTimeout] = defaultdict(AnswerTimeout)  # with a host
        for rank, (process, owner) in enumerate(zip(self._everyone, owners, strict=True)):
            if not self._memory.has(rank):
                here = process.host == self._everyone[self._own].host
                addresses = owner.addresses[:1] if here else most_likely_first(owner.addresses[1:])
                for reader, rooms in self._rooms.items():
                    self._links[reader, rank] = OwnerConnection(owner, addresses, patience[process.host], rooms)

    def publish(self, worker: int, round: int, vectors: Vectors) -> None:
        """Publish vectors: see `Mailbox.publish`."""
        start = self._where[worker][1] * self._layout.place
        place = self._memory.own[start : start + self._layout.place]
        with self._writing:
            self._layout.write(place, round, vectors, self._memory.fence)

    def look(self, worker: int, reader: int, round: int) -> Vectors | None:
        """Return a consistent copy, or None: see `Mailbox.look`."""
        rooms, (rank, i) = self._rooms[reader], self._where[worker]
        if reader in self._current:
            rooms.give(self._current.pop(reader))
        link = self._links.get((reader, rank))
        found = self._copied(rank, i, round, rooms) if link is None else link.look(i, round)
        if found is None:
            return None
        self._current[reader] = found
        return self._layout.vectors(found)

    def _copied(self, rank: int, i: int, round: int, rooms: BufferPool) -> np.ndarray | None:
        room = rooms.take()
        if self._layout.copy_latest(partial(self._memory.copy, rank), i, round, room):
            return room
        rooms.give(room)
        return None

    @property
    def torn(self) -> int:
        """Number of copies that were started again so far; for tests."""
        return self._layout.torn

    @property
    def name(self) -> bytes:
        """Unique name of this mailbox, the same on all processes; empty if it has no MPI window to free."""
        return self._memory.name if isinstance(self._memory, Windows) else b""

    def free_among(self, everyone: Sequence[Process]) -> None:
        """Free this mailbox's memory. MPI windows are freed collectively: every process calls this at the same point.
        If a process that created the window is lost, the window is leaked until exit, because MPI_Win_free would
        block.
        """
        self.stop()
        if isinstance(self._memory, Windows) and set(self._everyone) <= set(everyone):
            self._memory.free()

    def stop(self) -> None:
        """Stop copying and answering."""
        self._shown = None
        for link in self._links.values():
            link.close()


class Mailboxes:
    """The mailboxes of a world, and the server for requests from other processes."""

    def __init__(self) -> None:
        self._made: list[ProcessMailbox] = []  # in use, or with an MPI window; in the order of their creation
        self._service: MailboxServer | None = None

    def creation(
        self,
        about: str,
        nbytes: Sequence[int],
        everyone: Callable[[], Sequence[Process]],
        outdated: ProcessMailbox | None,
        mpi: Any = None,
    ) -> CreateMailbox:
        """Return the operation that creates a mailbox: see `CreateMailbox`."""
        return CreateMailbox(about, nbytes, everyone, self._serve, outdated, mpi)

    def keep(self, mailbox: ProcessMailbox, outdated: ProcessMailbox | None) -> ProcessMailbox:
        """Keep a mailbox that was created, in place of an outdated one, and return it."""
        self._made = [*(kept for kept in self._made if kept is not outdated or kept.name), mailbox]
        return mailbox

    def free_among(self, everyone: Sequence[Process]) -> None:
        """Free all memory: see `ProcessMailbox.free_among`."""
        for mailbox in self._made:
            mailbox.free_among(everyone)

    def stop(self) -> None:
        """Stop copying and answering."""
        for mailbox in self._made:
            mailbox.stop()
        self._made = []
        if self._service is not None:
            self._service.stop()

    def _serve(self) -> MailboxServer:
        self._service = self._service or MailboxServer()
        return self._service
