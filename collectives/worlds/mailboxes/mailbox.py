"""The mailbox of a world of several processes: each process has memory from which the others copy at any time.

Processes of the same host copy from shared memory (`shared_memory.py`), so a process that is slow, stopped or dead
delays no other. Processes of other hosts ask a thread of the owner (`remote.py`), with a short timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np

from adaptive.base.mailbox import Vectors
from collectives.worlds.connections import most_likely_first
from collectives.worlds.transport.operations import Operation
from collectives.worlds.transport.process_group import Process

from .remote import MailboxEndpoint, MailboxServer, RemoteReader
from .shared_memory import FileAddress, SharedFile, SlotLayout, open_shared

_KIND = crc32(b"mailbox")


class CreateMailbox(Operation):
    """The operation that creates a mailbox, `result`, for the processes of the group.

    Args:
      about: description of the operation, for errors.
      nbytes: sizes of the vectors that each worker publishes.
      everyone: returns those processes, by rank.
      server: returns the server of this process.
    """

    agreed = True

    def __init__(
        self,
        about: str,
        nbytes: Sequence[int],
        everyone: Callable[[], Sequence[Process]],
        server: Callable[[], MailboxServer],
    ):
        super().__init__(about, "", crc32(repr(tuple(nbytes)).encode(), _KIND), f"a mailbox of {tuple(nbytes)} bytes")
        self._nbytes, self._everyone, self._server = nbytes, everyone, server
        self.result: Any = None

    def carry_out(self, comm: Any) -> None:
        if self.result is not None:  # of an attempt in which a process was lost
            self.result.stop()
        everyone = self._everyone()
        made = self.result = ProcessMailbox(SlotLayout(self._nbytes), everyone, comm.rank)
        with closing(made.file):  # until all others have opened it
            made.open(comm.allgather(made.file.address))
            sees_all = all(comm.allgather(len(made.memory) == len(everyone)))
        if not sees_all:
            made.ask(comm.allgather(made.serve(self._server())))


class ProcessMailbox:
    """A mailbox with a place for each worker in the memory of its process: see `Mailbox`.

    Args:
      layout: layout of the memory of a process.
      everyone: the processes that have created the mailbox, by rank.
      own: this process's rank.

    Attributes:
      layout: layout of the memory of a process.
      file: this process's memory.
      memory: the memory of this process, and of others where it is accessible, by rank.
    """

    def __init__(self, layout: SlotLayout, everyone: Sequence[Process], own: int):
        self.layout, self._everyone, self._own = layout, everyone, own
        self._where = {slot: (rank, i) for rank, p in enumerate(everyone) for i, slot in enumerate(p.worker_slots)}
        self.file = SharedFile(len(everyone[own].worker_slots) * layout.place)
        self.memory = {own: self.file.memory}
        self._rooms: dict[int, list[np.ndarray]] = {reader: [] for reader in everyone[own].worker_slots}  # free ones
        self._current: dict[int, np.ndarray] = {}  # the latest result of each reader
        self._remote: dict[tuple[int, int], RemoteReader] = {}  # by reader and rank
        self._stop_serving: Callable[[], None] = lambda: None
        self._writing = threading.Lock()

    def open(self, addresses: Sequence[FileAddress]) -> None:
        """Open the memory of the other processes of this host, if possible. `addresses`: by rank."""
        for rank, process in enumerate(self._everyone):
            if addresses[rank].path and rank != self._own and process.host == self._everyone[self._own].host:
                with suppress(OSError, ValueError):
                    self.memory[rank] = open_shared(addresses[rank])

    def serve(self, server: MailboxServer) -> MailboxEndpoint:
        """Serve the vectors of this process's workers to other processes. Returns the endpoint for their requests."""

        def answer(worker: int, round: int) -> np.ndarray | None:
            room = np.empty(self.layout.slot, np.uint8)
            copy = partial(self.layout.copy_latest, self.file.memory, worker, round, room)
            if copy():
                return room
            with self._writing:  # publications may be too frequent for a copy without the lock
                return room if copy() else None

        endpoint = server.serve(answer)
        self._stop_serving = partial(server.remove, endpoint.mailbox)
        return endpoint

    def ask(self, owners: Sequence[MailboxEndpoint]) -> None:
        """Set the endpoints of all processes, by rank; used for those whose memory is not accessible here."""
        for rank, (process, owner) in enumerate(zip(self._everyone, owners, strict=True)):
            if rank not in self.memory:
                here = process.host == self._everyone[self._own].host
                addresses = owner.addresses[:1] if here else most_likely_first(owner.addresses[1:])
                for reader in self._rooms:
                    self._remote[reader, rank] = RemoteReader(owner, addresses, partial(self._take, reader))

    def publish(self, worker: int, round: int, vectors: Vectors) -> None:
        """Publish vectors: see `Mailbox.publish`."""
        with self._writing:
            self.layout.write(self.file.memory, self._where[worker][1], round, vectors)

    def look(self, worker: int, reader: int, round: int) -> Vectors | None:
        """Return a consistent copy, or None: see `Mailbox.look`."""
        rank, i = self._where[worker]
        if reader in self._current:
            self._rooms[reader].append(self._current.pop(reader))
        remote = self._remote.get((reader, rank))
        if remote is not None:
            found = remote.look(i, round)
        else:
            found = self._take(reader)
            if not self.layout.copy_latest(self.memory[rank], i, round, found):
                self._rooms[reader].append(found)
                found = None
        if found is None:
            return None
        self._current[reader] = found
        return self.layout.vectors(found)

    def _take(self, reader: int) -> np.ndarray:
        """Return a buffer for a publication."""
        with suppress(IndexError):  # another thread may have taken the last one
            return self._rooms[reader].pop()
        return np.empty(self.layout.slot, np.uint8)

    def stop(self) -> None:
        """Stop asking and answering."""
        self._stop_serving()
        for remote in self._remote.values():
            remote.close()


class Mailboxes:
    """The mailboxes of a world, and the server for requests from other hosts."""

    def __init__(self) -> None:
        self._made: list[ProcessMailbox] = []
        self._server: MailboxServer | None = None

    def creation(self, about: str, nbytes: Sequence[int], everyone: Callable[[], Sequence[Process]]) -> CreateMailbox:
        """Return the operation that creates a mailbox: see `CreateMailbox`."""
        return CreateMailbox(about, nbytes, everyone, self._serve)

    def keep(self, mailbox: ProcessMailbox, outdated: ProcessMailbox | None) -> ProcessMailbox:
        """Keep a mailbox that was created, in place of an outdated one, which is stopped. Returns it."""
        if outdated is not None:
            outdated.stop()
        self._made = [*(kept for kept in self._made if kept is not outdated), mailbox]
        return mailbox

    def stop(self) -> None:
        """Stop asking and answering."""
        for mailbox in self._made:
            mailbox.stop()
        self._made = []
        if self._server is not None:
            self._server.stop()

    def _serve(self) -> MailboxServer:
        self._server = self._server or MailboxServer()
        return self._server
