"""Fetches publications of workers on other hosts from their processes, with a short timeout.

The connection to a process is opened by the first request. If the answer is late, the request stays open: the next call
continues to receive the answer, without waiting, instead of asking again. A process that is stopped, dead or cut off
therefore costs one short wait. After a late answer the timeout is halved.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from collectives.worlds.watchdog.udp import Address
from launchers.ending import give_up_after

from .flows import WRITE, SocketFlow, greet_owner, receive, received, send
from .serving import ANSWER, QUESTION, MailboxEndpoint

_LONGEST, _LEAST = 0.25, 0.01  # seconds until an answer must begin to arrive
_SLOWEST = 20e6  # bytes per second at which the rest must arrive
_SECONDS_TO_CONNECT = 3.0  # to one address
_SECONDS_APART = 1.0  # between two attempts to connect
_SECONDS_TO_NOTICE = 60.0  # until the loss of the host at the other end is detected


class AnswerTimeout:
    """The timeout for answers of one host, adapted to whether answers arrive in time."""

    def __init__(self) -> None:
        self.seconds = _LONGEST

    def late(self) -> None:
        """Record a late answer: halve the timeout, not below 10 ms."""
        self.seconds = max(_LEAST, self.seconds / 2)

    def in_time(self) -> None:
        """Record an answer in time: double the timeout, up to 250 ms."""
        self.seconds = min(_LONGEST, 2 * self.seconds)


class BufferPool:
    """Buffers for received publications. Late answers occupy theirs until they are complete.

    Args:
      size: size of a buffer in bytes.
    """

    def __init__(self, size: int):
        self._size = size
        self._free: list[np.ndarray] = []

    def take(self) -> np.ndarray:
        """Take a free buffer from the pool, or allocate one."""
        return self._free.pop() if self._free else np.empty(self._size, np.uint8)

    def give(self, room: np.ndarray) -> None:
        """Return a buffer to the pool."""
        self._free.append(room)


class _Question(NamedTuple):
    place: int
    round: int
    room: np.ndarray  # for the answer
    flow: SocketFlow[bool]


class OwnerConnection:
    """The connection of one reader to one process, the owner of publications. Used by one thread at a time.

    Args:
      owner: the owner's endpoint.
      addresses: the owner's addresses that may be reachable from here.
      patience: the timeout, shared by all connections to the owner's host.
      rooms: the reader's buffers.
    """

    def __init__(
        self, owner: MailboxEndpoint, addresses: Sequence[Address], patience: AnswerTimeout, rooms: BufferPool
    ):
        self._owner, self._addresses, self._patience, self._rooms = owner, list(addresses), patience, rooms
        self._line: socket.socket | None = None
        self._under_way: _Question | None = None
        self._not_before = 0.0  # time of the next attempt
        self._until = 0.0  # when the answer is late

    def look(self, place: int, round: int) -> np.ndarray | None:
        """Return the latest publication of one of the owner's workers in a round, in a buffer of the pool; None if
        there is none, or its answer is late.
        """
        late = self._under_way
        if late is not None:
            found = self._go_on(late, wait=False)
            if self._under_way is not None or self._line is None:
                return None
            if found is not None and (late.place, late.round) == (place, round):
                return found
            if found is not None:
                self._rooms.give(found)
        now = time.monotonic()
        if self._line is None and now < self._not_before:
            return None
        room = self._rooms.take()
        self._until = now + self._patience.seconds
        self._under_way = _Question(place, round, room, self._asking(place, round, room))
        found = self._go_on(self._under_way, wait=True)
        if self._under_way is not None:
            self._patience.late()
        elif self._line is not None:
            self._patience.in_time()
        return found

    def close(self) -> None:
        """Close the connection."""
        self._under_way = None
        if self._line is not None:
            self._line.close()
            self._line = None

    def _go_on(self, question: _Question, *, wait: bool) -> np.ndarray | None:
        """Continue to send a question and receive its answer, within the timeout if `wait`, else without waiting."""
        try:
            while True:
                if not self._ready(next(question.flow), wait=wait):
                    return None
        except StopIteration as done:
            self._under_way = None
            if done.value:
                return question.room
        except OSError:
            self.close()
            self._not_before = time.monotonic() + _SECONDS_APART
        self._rooms.give(question.room)
        return None

    def _ready(self, waits: int, *, wait: bool) -> bool:
        assert self._line is not None
        return _is_ready(self._line, waits, max(0.0, self._until - time.monotonic()) if wait else 0.0)

    def _asking(self, place: int, round: int, room: np.ndarray) -> SocketFlow[bool]:
        """Send the question, and receive the answer. Returns whether it contains a publication."""
        if self._line is None:
            yield from self._connecting()
        line = self._line
        assert line is not None
        yield from send(line, QUESTION.pack(self._owner.mailbox, place, round))
        (number,) = ANSWER.unpack((yield from received(line, ANSWER.size)))
        if number:
            self._until += room.size / _SLOWEST
            yield from receive(line, room.data)
        return bool(number)

    def _connecting(self) -> SocketFlow[None]:
        """Connect to the first address that reaches the owner, and try this address first from then on."""
        error: OSError = ConnectionError("no address")
        for address in list(self._addresses):
            self._line = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                yield from _in_time(_connected(self._line, address, self._owner.key))
            except OSError as failed:
                self._line.close()
                error = failed
                continue
            self._addresses.remove(address)
            self._addresses.insert(0, address)
            return
        raise error


def _is_ready(line: socket.socket, waits: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(line, waits)
    return bool(poll.poll(1000 * seconds))


def _connected(line: socket.socket, address: Address, key: bytes) -> SocketFlow[None]:
    line.setblocking(False)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    give_up_after(line, _SECONDS_TO_NOTICE)
    failed = line.connect_ex(tuple(address))
    if failed == errno.EINPROGRESS:
        while not _is_ready(line, WRITE, 0.0):  # the generator may be resumed too early
            yield WRITE
        failed = line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if failed:
        raise OSError(failed, os.strerror(failed))
    yield from greet_owner(line, key)


def _in_time(flow: SocketFlow[None]) -> SocketFlow[None]:
    until = time.monotonic() + _SECONDS_TO_CONNECT
    for waits in flow:
        yield waits
        if time.monotonic() > until:
            raise TimeoutError("no answer")


def most_likely_first(addresses: Sequence[Address]) -> list[Address]:
    """Return addresses sorted by how likely they lead to another host: those in this host's networks first, and those
    that are also this host's own last, because many hosts have them (a bridge to containers, for example).
    """
    import psutil

    own = [a for all_of in psutil.net_if_addrs().values() for a in all_of if a.family == socket.AF_INET and a.netmask]
    hosts = {a.address for a in own}
    networks = [ipaddress.ip_network((a.address, a.netmask), strict=False) for a in own]

    def likelihood(address: Address) -> int:
        if address[0] in hosts:
            return 2
        return 0 if any(ipaddress.ip_address(address[0]) in network for network in networks) else 1

    return sorted(addresses, key=likelihood)
