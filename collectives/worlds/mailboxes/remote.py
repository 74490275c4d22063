"""Publications for processes on other hosts: the owner's threads answer requests, and a reader's thread makes them.

MPI's one-sided communication is not used between hosts, because there it needs the owner's cooperation: Open MPI 5.0.11
waits forever for a lost host, and delivers only while the owner polls, which costs a busy host a time slice per poll.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from collectives.worlds.connections import Address, accept, addresses_of, connect, limit_receive, shut_down

_QUESTION = struct.Struct("=Iq")  # numbers of one of the owner's workers, and of a round
_PIECE = 1 << 20  # bytes of an answer that are sent at once
_LONGEST, _LEAST = 0.25, 0.01  # seconds until an answer must have arrived
_SECONDS_TO_CONNECT = 3.0
_SECONDS_APART = 1.0  # between two attempts to connect
_SECONDS_TO_ANSWER = 60.0  # until a connection is given up

Endpoint = tuple[Sequence[Address], bytes]  # the addresses of a server, and its key


class MailboxServer:
    """Answers other processes' requests for publications. Each connection has a thread, so a slow reader delays no
    other one.

    Args:
      answer: `answer(worker of this process, round)` returns its publication, or None.

    Attributes:
      endpoint: where readers connect.
    """

    def __init__(self, answer: Callable[[int, int], np.ndarray | None]):
        self._answer = answer
        self._door = socket.create_server(("", 0), backlog=128)
        self.endpoint: Endpoint = (addresses_of(self._door), secrets.token_bytes(32))
        self._over = False
        _start(self._admit)

    def stop(self) -> None:
        """Accept no more connections, and end those on which a further request arrives."""
        if not self._over:
            self._over = True
            with suppress(OSError):
                self._door.shutdown(socket.SHUT_RDWR)
            self._door.close()

    def _admit(self) -> None:
        while not self._over:
            try:
                line = accept(self._door, self.endpoint[1])
            except OSError:  # a stranger, or there are no file descriptors
                time.sleep(0.01)
                continue
            _start(self._talk, line)

    def _talk(self, line: Connection) -> None:
        """Answer the requests of one reader."""
        with line, suppress(OSError, EOFError):  # the reader has ended
            while (question := line.recv_bytes()) and not self._over:
                found = self._answer(*_QUESTION.unpack(question))
                line.send_bytes(b"" if found is None else b"+")
                for start in range(0, 0 if found is None else found.size, _PIECE):
                    line.send_bytes(found.data[start : start + _PIECE])  # type: ignore[union-attr]


class RemoteReader:
    """One reader's view of the publications of another process. A thread connects, asks and receives; `look` waits for
    it shortly. A process that is stopped, dead or cut off therefore costs one short wait.

    Args:
      owner: the other process's endpoint.
      nbytes: size of a publication.
    """

    def __init__(self, owner: Endpoint, nbytes: int):
        self._owner, self._nbytes = owner, nbytes
        self._line: Connection | None = None
        self._not_before = 0.0  # time of the next attempt to connect
        self._thread: threading.Thread | None = None  # of the latest request, until its answer is used or dropped
        self._question = (0, 0)
        self._found: np.ndarray | None = None
        self._patience = _LONGEST

    def look(self, worker: int, round: int) -> np.ndarray | None:
        """Return the latest publication of one of the owner's workers in a round; None if there is none, or the answer
        is late. A late answer is used by the next call if it asks the same, and else dropped; after it, the timeout is
        halved.
        """
        question = worker, round
        if self._thread is None or not (self._thread.is_alive() or self._question == question):
            self._question, self._found = question, None
            self._thread = _start(self._ask, *question)
            self._thread.join(self._patience)
            late = self._thread.is_alive()
            self._patience = max(_LEAST, self._patience / 2) if late else min(_LONGEST, 2 * self._patience)
        if self._thread.is_alive() or self._question != question:
            return None
        self._thread = None
        return self._found

    def close(self) -> None:
        """Close the connection, which ends the thread, and make no other one."""
        self._not_before = float("inf")
        if self._line is not None:
            shut_down(self._line)

    def _ask(self, worker: int, round: int) -> None:
        try:
            if self._line is None and time.monotonic() >= self._not_before:
                self._not_before = max(self._not_before, time.monotonic() + _SECONDS_APART)
                self._line = connect(*self._owner, _SECONDS_TO_CONNECT)
                limit_receive(self._line, _SECONDS_TO_ANSWER)
            if self._line is not None:
                self._found = self._answer(self._line, worker, round)
        except (OSError, EOFError):
            if self._line is not None:
                self._line.close()
                self._line = None

    def _answer(self, line: Connection, worker: int, round: int) -> np.ndarray | None:
        line.send_bytes(_QUESTION.pack(worker, round))
        if not line.recv_bytes():
            return None
        found = np.empty(self._nbytes, np.uint8)
        for start in range(0, self._nbytes, _PIECE):
            line.recv_bytes_into(found.data, start)
        return found


def _start(work: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, name="adaptive-mailbox", daemon=True)
    thread.start()
    return thread
