"""Nonblocking socket I/O by generators, which yield the events that they wait for.

A connection begins with a *greeting*: each end proves that it has the key, without sending it. An address may belong to
an unrelated process on another network.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
READ, WRITE = select.POLLIN, select.POLLOUT
SocketFlow = Generator[int, None, T]  # yields READ or WRITE; raises OSError if the connection fails

_NONCE, _SEAL = 16, 32  # bytes


class StrangerError(OSError):
    """The process at the other end does not have the key."""


def receive(line: socket.socket, room: memoryview) -> SocketFlow[None]:
    """Receive until the buffer is full.

    Raises:
      ConnectionResetError: the other end has closed the connection.
    """
    got = 0
    while got < len(room):
        try:
            n = line.recv_into(room[got:])
        except BlockingIOError:
            yield READ
            continue
        if not n:
            raise ConnectionResetError("closed")
        got += n


def received(line: socket.socket, length: int) -> SocketFlow[bytearray]:
    """Receive and return `length` bytes."""
    room = bytearray(length)
    yield from receive(line, memoryview(room))
    return room


def send(line: socket.socket, what: bytes | bytearray | memoryview) -> SocketFlow[None]:
    """Send all bytes."""
    rest = memoryview(what)
    while rest:
        try:
            rest = rest[line.send(rest) :]
        except BlockingIOError:
            yield WRITE


def greet_asker(line: socket.socket, key: bytes) -> SocketFlow[None]:
    """Authenticate the connection as the owner of the key, with a process that asks.

    Raises:
      StrangerError: the other process does not have the key.
    """
    own = secrets.token_bytes(_NONCE)
    yield from send(line, own)
    said = yield from received(line, _NONCE + _SEAL)
    theirs, seal = bytes(said[:_NONCE]), said[_NONCE:]
    if not hmac.compare_digest(seal, _seal(key, b"asks", own, theirs)):
        raise StrangerError("it does not have the key")
    yield from send(line, _seal(key, b"answers", own, theirs))


def greet_owner(line: socket.socket, key: bytes) -> SocketFlow[None]:
    """Authenticate the connection as the process that asks, with the owner of the key.

    Raises:
      StrangerError: the other process does not have the key.
    """
    own = secrets.token_bytes(_NONCE)
    theirs = bytes((yield from received(line, _NONCE)))
    yield from send(line, own + _seal(key, b"asks", theirs, own))
    seal = yield from received(line, _SEAL)
    if not hmac.compare_digest(seal, _seal(key, b"answers", theirs, own)):
        raise StrangerError("it does not have the key")


def _seal(key: bytes, what: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(key, b"".join([what, *nonces]), "sha256")
