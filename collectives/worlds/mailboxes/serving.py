"""A server thread that sends the latest publications of this process's workers to processes on other hosts.

One thread handles all connections without blocking; data that a reader does not receive yet are kept. The thread sleeps
in the kernel until a request arrives, and sends without holding Python's lock, so steps are hardly slowed down.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from adaptive.base.exit_hooks import register_exit_hook
from collectives.worlds.watchdog.udp import Address, own_hosts
from launchers.ending import give_up_after

from .flows import READ, WRITE, SocketFlow, greet_asker, received, send
from .seqlock import Copy, SlotLayout

QUESTION = struct.Struct("=QIq")  # numbers of a mailbox, of one of the owner's workers, and of a round
ANSWER = struct.Struct("=Q")  # number of the publication, which follows it; 0 if there is none of this round
_SECONDS_TO_GREET = 5.0
_SECONDS_TO_NOTICE = 60.0  # until the loss of the host at the other end is detected
_SECONDS_IF_FULL = 0.01
_BACKLOG = 128

_log = logging.getLogger("adaptive")


class MailboxEndpoint(NamedTuple):
    """The address of a process's mailbox server.

    Attributes:
      addresses: the first is for processes of the same host, the others for other hosts.
      mailbox: number of the mailbox on that server.
    """

    addresses: tuple[Address, ...]
    key: bytes
    mailbox: int


class PublishedCopies:
    """Copies of this process's publications. Used only by the server thread.

    Args:
      layout: layout of the memory.
      copy: copies from this process's memory.
      writing: lock that this process's workers hold while they publish.
    """

    def __init__(self, layout: SlotLayout, copy: Copy, writing: threading.Lock):
        self._layout, self._copy, self._writing = layout, copy, writing
        self._latest: dict[int, _Answer] = {}  # by place

    def newest(self, place: int, round: int) -> _Answer | None:
        """Return a copy of a worker's latest publication of this round, or None. Readers may share a copy."""
        number = self._layout.number(self._copy, place, round)
        latest = self._latest.get(place)
        if not number:
            return None
        if latest is not None and latest.number == number:
            return latest
        if latest is None or latest.readers:
            latest = self._latest[place] = _Answer(np.empty(self._layout.slot, np.uint8))
        latest.number = self._layout.copy_latest(self._copy, place, round, latest.slot)
        if not latest.number:  # publications are too frequent for a copy without the lock
            with self._writing:
                latest.number = self._layout.copy_latest(self._copy, place, round, latest.slot)
        return latest if latest.number else None


class _Answer:
    """A copy of a publication. It is not overwritten while it is sent."""

    def __init__(self, slot: np.ndarray):
        self.slot, self.number, self.readers = slot, 0, 0


class MailboxServer:
    """The server of a process."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._shown: WeakValueDictionary[int, PublishedCopies] = WeakValueDictionary()
        self._mailboxes = 0
        self._door = socket.create_server(("", 0), backlog=_BACKLOG)
        self._door.setblocking(False)
        port = self._door.getsockname()[1]
        self._addresses = tuple((host, port) for host in own_hosts())
        self._bell, self._ring = socket.socketpair()
        self._over, self._pid = False, os.getpid()
        self._greeting: dict[socket.socket, float] = {}  # since when
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="adaptive-mailbox", daemon=True)
        self._thread.start()
        self._forget = register_exit_hook(self.stop)

    def show(self, shown: PublishedCopies) -> MailboxEndpoint:
        """Serve a mailbox's publications, as long as `shown` is referenced elsewhere. Returns the endpoint."""
        self._mailboxes += 1
        self._shown[self._mailboxes] = shown
        return MailboxEndpoint(self._addresses, self._key, self._mailboxes)

    def stop(self) -> None:
        """Stop the thread."""
        if not self._over and os.getpid() == self._pid:  # a forked child shares the sockets, and has no thread
            self._over = True
            with suppress(BrokenPipeError):  # another event has woken the thread, which has ended
                self._ring.send(b"!")
            self._thread.join()
            self._ring.close()
            self._forget()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over:
            for key, _ in self._selector.select(_SECONDS_TO_GREET if self._greeting else None):
                if key.fileobj is self._door:
                    self._admit()
                elif key.data is not None:
                    self._go_on(key.fileobj, key.data)  # type: ignore[arg-type]
            late = time.monotonic() - _SECONDS_TO_GREET
            for line in [line for line, since in self._greeting.items() if since < late]:
                self._end(line)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _admit(self) -> None:
        try:
            line, _ = self._door.accept()
        except OSError:  # the other end has closed, or there are no file descriptors
            time.sleep(_SECONDS_IF_FULL)
            return
        line.setblocking(False)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        give_up_after(line, _SECONDS_TO_NOTICE)
        self._greeting[line] = time.monotonic()
        flow = self._answering(line)
        self._selector.register(line, selectors.EVENT_READ, flow)
        self._go_on(line, flow)

    def _go_on(self, line: socket.socket, flow: SocketFlow[None]) -> None:
        """Continue to answer on a connection, as far as possible without blocking."""
        try:
            waits = next(flow)
        except Exception as error:
            if not isinstance(error, OSError | StopIteration):  # the reader has ended, or is a stranger
                _log.exception("Sending a publication failed; its reader continues without it.")
            self._end(line)
            return
        event = {READ: selectors.EVENT_READ, WRITE: selectors.EVENT_WRITE}[waits]
        if self._selector.get_key(line).events != event:
            self._selector.modify(line, event, flow)

    def _end(self, line: socket.socket) -> None:
        self._selector.unregister(line).data.close()
        self._greeting.pop(line, None)
        line.close()

    def _answering(self, line: socket.socket) -> SocketFlow[None]:
        """Authenticate one reader, and answer its questions."""
        yield from greet_asker(line, self._key)
        self._greeting.pop(line, None)
        while True:
            question = QUESTION.unpack((yield from received(line, QUESTION.size)))
            yield from self._answer(line, *question)

    def _answer(self, line: socket.socket, mailbox: int, place: int, round: int) -> SocketFlow[None]:
        shown = self._shown.get(mailbox)
        found = shown.newest(place, round) if shown is not None else None
        del shown  # so that it can be freed before this reader has received everything
        if found is None:
            yield from send(line, ANSWER.pack(0))
            return
        found.readers += 1
        try:
            yield from send(line, ANSWER.pack(found.number))
            yield from send(line, found.slot.data)
        finally:
            found.readers -= 1
