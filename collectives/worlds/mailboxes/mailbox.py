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

from adaptive.base.mailbox import Mailbox, Vectors
from collectives.worlds.transport.operations import Operation
from collectives.worlds.transport.process_group import Process

from .remote import Endpoint, MailboxServer, RemoteReader
from .shared_memory import FileAddress, SharedFile, SlotLayout, open_shared

_KIND = crc32(b"mailbox")


class CreateMailbox(Operation):
    """The operation that creates a mailbox, `result`, for the processes of the group, which `everyone()` returns."""

    agreed = True

    def __init__(self, about: str, nbytes: Sequence[int], everyone: Callable[[], Sequence[Process]]):
        super().__init__(about, "", crc32(repr(tuple(nbytes)).encode(), _KIND), f"a mailbox of {tuple(nbytes)} bytes")
        self._nbytes, self._everyone = nbytes, everyone
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
            made.ask(comm.allgather(made.serve()))


class ProcessMailbox(Mailbox):
    """A mailbox with a place for each worker in the memory of its process: see `Mailbox`.

    Args:
      layout: layout of the memory of a process.
      everyone: the processes that have created the mailbox, by rank.
      own: this process's rank.

    Attributes:
      file: this process's memory.
      memory: the memory of this process, and of others where it is accessible, by rank.
    """

    def __init__(self, layout: SlotLayout, everyone: Sequence[Process], own: int):
        self._layout, self._everyone, self._own = layout, everyone, own
        self._where = {slot: (rank, i) for rank, p in enumerate(everyone) for i, slot in enumerate(p.worker_slots)}
        self.file = SharedFile(len(everyone[own].worker_slots) * layout.place)
        self.memory = {own: self.file.memory}
        self._copies: dict[int, np.ndarray] = {}  # by reader: from shared memory
        self._remote: dict[tuple[int, int], RemoteReader] = {}  # by reader and rank
        self._server: MailboxServer | None = None
        self._writing = threading.Lock()

    def open(self, addresses: Sequence[FileAddress]) -> None:
        """Open the memory of the other processes of this host, if possible. `addresses`: by rank."""
        for rank, process in enumerate(self._everyone):
            if addresses[rank].path and rank != self._own and process.host == self._everyone[self._own].host:
                with suppress(OSError, ValueError):
                    self.memory[rank] = open_shared(addresses[rank])

    def serve(self) -> Endpoint:
        """Serve the vectors of this process's workers to other processes. Returns the endpoint for their requests."""

        def answer(worker: int, round: int) -> np.ndarray | None:
            found = np.empty(self._layout.slot, np.uint8)
            copy = partial(self._layout.copy_latest, self.file.memory, worker, round, found)
            if copy():
                return found
            with self._writing:  # publications may be too frequent for a copy without the lock
                return found if copy() else None

        self._server = MailboxServer(answer)
        return self._server.endpoint

    def ask(self, owners: Sequence[Endpoint]) -> None:
        """Set the endpoints of all processes, by rank; used for those whose memory is not accessible here."""
        for rank, owner in enumerate(owners):
            for reader in self._everyone[self._own].worker_slots:
                if rank not in self.memory:
                    self._remote[reader, rank] = RemoteReader(owner, self._layout.slot)

    def publish(self, worker: int, round: int, vectors: Vectors) -> None:
        """Publish vectors: see `Mailbox.publish`."""
        with self._writing:
            self._layout.write(self.file.memory, self._where[worker][1], round, vectors)

    def look(self, worker: int, reader: int, round: int) -> Vectors | None:
        """Return a consistent copy, or None: see `Mailbox.look`."""
        rank, i = self._where[worker]
        if rank not in self.memory:
            found = self._remote[reader, rank].look(i, round)
            return None if found is None else self._layout.vectors(found)
        if reader not in self._copies:
            self._copies[reader] = np.empty(self._layout.slot, np.uint8)
        copied = self._layout.copy_latest(self.memory[rank], i, round, self._copies[reader])
        return self._layout.vectors(self._copies[reader]) if copied else None

    def stop(self) -> None:
        """Stop asking and answering."""
        if self._server is not None:
            self._server.stop()
        for remote in self._remote.values():
            remote.close()
