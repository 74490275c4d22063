"""Authenticated TCP connections between the processes of a job: `multiprocessing.connection` with timeouts.

A process may have several addresses, of which some lead elsewhere: an address may belong to an unrelated process on
another network. So both ends prove that they have the key, without sending it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import time
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from launchers.ending import give_up_after

Address = tuple[str, int]  # a host and a port

_LOOPBACK = "127.0.0.1"
_SECONDS_TO_GREET = 5.0
_SECONDS_TO_NOTICE = 60.0  # until the loss of the host at the other end is detected


def own_hosts() -> list[str]:
    """Return the addresses of this host in all its networks, the loopback address first."""
    import psutil

    found = [a.address for each in psutil.net_if_addrs().values() for a in each if a.family == socket.AF_INET]
    return [_LOOPBACK, *dict.fromkeys(address for address in found if not address.startswith("127."))]


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
      seconds: the longest time for all addresses together.

    Raises:
      OSError: no address leads to it.
    """
    until, error = time.monotonic() + seconds, OSError("it has only a loopback address")
    for host, port in addresses:
        try:
            left = max(1.0, (until - time.monotonic()) / len(addresses))
            return _greet(socket.create_connection((host, port), timeout=left), key, asks_first=False)
        except OSError as failed:
            error = OSError(f"{host}:{port}: {failed}")
    raise error


def _greet(line: socket.socket, key: bytes, *, asks_first: bool) -> Connection:
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    give_up_after(line, _SECONDS_TO_NOTICE)
    limit_receive(line, _SECONDS_TO_GREET)
    connection = Connection(line.detach())
    try:
        for greet in (deliver_challenge, answer_challenge) if asks_first else (answer_challenge, deliver_challenge):
            greet(connection, key)
        limit_receive(connection, 0.0)
    except (AuthenticationError, EOFError, AssertionError, OSError) as error:
        connection.close()
        raise OSError(f"another process answers ({error or type(error).__name__})") from error
    return connection


def limit_receive(line: socket.socket | Connection, seconds: float) -> None:
    """Let reads fail with OSError if nothing arrives for so long; 0: never."""
    with socket.socket(fileno=os.dup(line.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), 0))


def shut_down(connection: Connection) -> None:
    """End a connection, also for a thread that reads from it."""
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the other end has closed it, or it is closed


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
