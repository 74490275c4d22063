"""Authenticated TCP connections between the processes of a job: `multiprocessing.connection` with timeouts.

A process may have several addresses, of which some lead elsewhere: an address may belong to an unrelated process on
another network. So both ends prove that they have the key, without sending it.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from launchers.ending import addresses, give_up_after

Address = tuple[str, int]  # a host and a port

_MOST_ADDRESSES = 32
_SECONDS_TO_GREET = 5.0
_SECONDS_TO_NOTICE = 60.0  # until the loss of the host at the other end is detected


def addresses_of(door: socket.socket) -> list[Address]:
    """Return the addresses of a listening socket in the networks of this host, the loopback address last."""
    return [(host, door.getsockname()[1]) for host in addresses()[-_MOST_ADDRESSES:]]


def accept(door: socket.socket, key: bytes) -> Connection:
    """Accept a connection, and authenticate it.

    Raises:
      OSError: the other process does not have the key, or does not answer; or the socket is closed or timed out.
    """
    line, _ = door.accept()
    return _greet(line, key, asks_first=True)


def connect(addresses: Sequence[Address], key: bytes, seconds: float) -> Connection:
    """Connect to the process with the key, at the first of its addresses that leads to it.

    Args:
      seconds: the longest time for all addresses together, but at least a second for each.

    Raises:
      OSError: no address leads to it.
    """
    until, errors = time.monotonic() + seconds, []
    for host, port in addresses:
        try:
            left = max(1.0, (until - time.monotonic()) / len(addresses))
            return _greet(socket.create_connection((host, port), timeout=left), key, asks_first=False)
        except OSError as failed:
            errors.append(f"{host}:{port}: {failed}")
    raise OSError("; ".join(errors))


def _greet(line: socket.socket, key: bytes, *, asks_first: bool) -> Connection:
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    give_up_after(line, _SECONDS_TO_NOTICE)
    connection = Connection(line.detach())
    limit_receive(connection, _SECONDS_TO_GREET)
    try:
        for greet in (deliver_challenge, answer_challenge) if asks_first else (answer_challenge, deliver_challenge):
            greet(connection, key)
        limit_receive(connection, 0.0)
    except (AuthenticationError, EOFError, AssertionError, OSError) as error:
        connection.close()
        raise OSError(f"another process answers ({error or type(error).__name__})") from error
    return connection


def limit_receive(connection: Connection, seconds: float) -> None:
    """Let reads fail with OSError if nothing arrives for so long; 0: never."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), 0))


def shut_down(connection: Connection) -> None:
    """End a connection, also for a thread that reads from it."""
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the other end has closed it, or it is closed
