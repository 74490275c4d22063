"""Publications for processes on other hosts: the owner's threads answer requests, and a reader's threads make them.

MPI's one-sided communication is not used between hosts, because there it needs the owner's cooperation: Open MPI 5.0.11
waits forever for a lost host, and delivers only while the owner polls, which costs a busy host a time slice per poll.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from adaptive.base.exit_hooks import register_exit_hook
from collectives.worlds.connections import Address, accept, connect, limit_receive, own_hosts, shut_down

_QUESTION = struct.Struct("=QIq")  # numbers of a mailbox, of one of the owner's workers, and of a round
_PIECE = 1 << 20  # bytes of an answer that are sent at once
_LONGEST, _LEAST = 0.25, 0.01  # seconds until an answer must have arrived
_SECONDS_TO_CONNECT = 3.0
_SECONDS_APART = 1.0  # between two attempts to connect
_SECONDS_TO_ANSWER = 60.0  # until a connection is given up

Answer = Callable[[int, int], np.ndarray | None]  # (worker of the owner, round) -> its publication


class MailboxEndpoint(NamedTuple):
    """The address of a process's mailbox server.

    Attributes:
      addresses: the first is for processes of the same host, the others for other hosts.
      mailbox: number of the mailbox on that server.
    """

    addresses: tuple[Address, ...]
    key: bytes
    mailbox: int


class MailboxServer:
    """The server of a process. Each reader's connection has a thread, which sleeps until a request arrives, so a slow
    reader delays no other one.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._answers: dict[int, Answer] = {}
        self._mailboxes = 0
        self._door = socket.create_server(("", 0), backlog=128)
        port = self._door.getsockname()[1]
        self._addresses = tuple((host, port) for host in own_hosts())
        self._lines: list[Connection] = []
        self._over, self._pid = False, os.getpid()
        self._forget = register_exit_hook(self.stop)
        _start(self._admit)

    def serve(self, answer: Answer) -> MailboxEndpoint:
        """Serve a mailbox until `remove`. Returns the endpoint for requests."""
        self._mailboxes += 1
        self._answers[self._mailboxes] = answer
        return MailboxEndpoint(self._addresses, self._key, self._mailboxes)

    def remove(self, mailbox: int) -> None:
        """Answer no more requests for a mailbox."""
        self._answers.pop(mailbox, None)

    def stop(self) -> None:
        """End all connections."""
        if not self._over and os.getpid() == self._pid:  # a forked child shares the sockets, and has no threads
            self._over = True
            with suppress(OSError):
                self._door.shutdown(socket.SHUT_RDWR)
            self._door.close()
            for line in list(self._lines):
                shut_down(line)
            self._forget()

    def _admit(self) -> None:
        while not self._over:
            try:
                line = accept(self._door, self._key)
            except OSError:  # a stranger, or there are no file descriptors
                time.sleep(0.01)
                continue
            self._lines.append(line)
            _start(self._talk, line)

    def _talk(self, line: Connection) -> None:
        """Answer the requests of one reader."""
        with line, suppress(OSError, EOFError):  # the reader has ended
            while not self._over:
                mailbox, worker, round = _QUESTION.unpack(line.recv_bytes())
                answer = self._answers.get(mailbox)
                found = None if answer is None else answer(worker, round)
                line.send_bytes(b"" if found is None else b"+")
                for start in range(0, 0 if found is None else found.size, _PIECE):
                    line.send_bytes(found.data[start : start + _PIECE])  # type: ignore[union-attr]
        self._lines.remove(line)


class RemoteReader:
    """One reader's view of the publications of another process. Its thread connects, asks and receives; `look` waits
    for it shortly. A process that is stopped, dead or cut off therefore costs one short wait.

    Args:
      owner: the other process's endpoint.
      addresses: the addresses of the owner that may be reachable from here.
      take: returns a buffer for an answer.
    """

    def __init__(self, owner: MailboxEndpoint, addresses: Sequence[Address], take: Callable[[], np.ndarray]):
        self._owner, self._addresses, self._take = owner, list(addresses), take
        self._line: Connection | None = None
        self._requests: SimpleQueue[tuple[int, int, Future[np.ndarray | None]] | None] | None = None
        self._asked: tuple[int, int, Future[np.ndarray | None]] | None = None  # a question without an answer yet
        self._patience = _LONGEST

    def look(self, worker: int, round: int) -> np.ndarray | None:
        """Return the latest publication of one of the owner's workers in a round; None if there is none, or the answer
        is late. A late answer is used by the next call, if it asks the same; after it, the timeout is halved.
        """
        if self._asked is not None:
            *question, late = self._asked
            if not late.done():
                return None
            self._asked = None
            if question == [worker, round]:
                return late.result()
        if self._requests is None:
            self._requests = SimpleQueue()
            _start(self._run, self._requests)
        future: Future[np.ndarray | None] = Future()
        self._requests.put((worker, round, future))
        if wait([future], self._patience).done:
            self._patience = min(_LONGEST, 2 * self._patience)
            return future.result()
        self._asked, self._patience = (worker, round, future), max(_LEAST, self._patience / 2)
        return None

    def close(self) -> None:
        """Close the connection, and end the thread."""
        if self._requests is not None:
            self._requests.put(None)
        if self._line is not None:
            shut_down(self._line)

    def _run(self, requests: SimpleQueue) -> None:
        not_before = 0.0  # time of the next attempt to connect
        while (request := requests.get()) is not None:
            worker, round, future = request
            found = None
            try:
                if self._line is None and time.monotonic() >= not_before:
                    not_before = time.monotonic() + _SECONDS_APART
                    self._line = connect(self._addresses, self._owner.key, _SECONDS_TO_CONNECT)
                    limit_receive(self._line, _SECONDS_TO_ANSWER)
                if self._line is not None:
                    found = self._ask(self._line, worker, round)
            except (OSError, EOFError):
                if self._line is not None:
                    self._line.close()
                    self._line = None
            future.set_result(found)
        if self._line is not None:
            self._line.close()

    def _ask(self, line: Connection, worker: int, round: int) -> np.ndarray | None:
        line.send_bytes(_QUESTION.pack(self._owner.mailbox, worker, round))
        if not line.recv_bytes():
            return None
        room = self._take()
        for start in range(0, room.size, _PIECE):
            line.recv_bytes_into(room.data, start)
        return room


def _start(work: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=work, args=arguments, name="adaptive-mailbox", daemon=True).start()
