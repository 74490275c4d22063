"""A tree of TCP connections between the processes of `jax.distributed`, for small sums on the host.

XLA matches collectives only by their order, and waits silently, even forever, in one that some process does not enter.
Processes therefore first agree without XLA: by TCP, along a tree, from each process to its parent and back. Between two
processes of one host this takes 15 µs. The smallest XLA collective over gloo took 0.3 to 3.5 ms there, and a value
through the coordinator's key-value store 0.5 ms (two cores). On GPUs a collective would wait for the stream.

When a process ends, its connections close. Processes that wait on them notice at once and close theirs, so all notice.

A process has one tree for all of its worlds, because XLA runs the collectives of all its programs in one order.
"""

from __future__ import annotations

import atexit
import hmac
import json
import os
import pickle
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collectives.worlds.launch import LaunchError
from collectives.worlds.watchdog.udp import own_hosts
from launchers import ending

T = TypeVar("T")

BELOW = 8  # children of a process, at most: up to nine processes are a star
SECONDS_TO_COME = 300.0  # for all processes to create their first world; JAX's own timeout at the start
_SECONDS_TO_CONNECT = 30.0
_SECONDS_TO_NOTICE = 60.0  # until the loss of a host that did not close its connections is detected
_SECONDS_TO_END = 5.0  # for exit handlers, if a process was lost
_EXIT_STATUS = 1
_ROOM = 4096  # bytes for the addresses that a process sends at the start
_SECRET = 16  # bytes
_LENGTH = struct.Struct("=Q")
_RANK = struct.Struct("=I")


class TCPTreeError(Exception):
    """A connection is closed, because its other process has ended or the network failed."""


class TCPTree:
    """The connections of this process: to its parent, and to its children.

    Attributes:
      rank, processes: JAX's process index and process count.
      lock: held during an operation.
      worlds: number of worlds that the processes have created.
      threads: names of the threads that have used any world, by identifier.

    Raises:
      LaunchError: the processes cannot connect to each other.
    """

    def __init__(self) -> None:
        self.rank, self.processes = jax.process_index(), jax.process_count()
        self.lock = threading.Lock()
        self.worlds = 0
        self.threads: dict[int, str] = {}
        self._why_closed = ""
        above, below = _neighbors(self.rank, self.processes)
        self._above: tuple[int, socket.socket] | None = None
        self._below: dict[int, socket.socket] = {}
        with socket.create_server(("", 0), backlog=max(1, len(below))) as door:
            secret = secrets.token_bytes(2 * _SECRET)
            addresses = [(host, door.getsockname()[1]) for host in own_hosts()]
            announced = _of_everyone(json.dumps([secret.hex(), socket.gethostname(), addresses]).encode())
            if above is not None:
                key, host, addresses = json.loads(announced[above])
                reachable = addresses if host == socket.gethostname() else addresses[1:]  # the first is loopback
                self._above = above, _connect(above, bytes.fromhex(key), reachable, self.rank)
            self._below = _admit(door, secret, below)
        self._lines = [*self._below.items(), *([self._above] if self._above else [])]
        self._room = np.empty(0)
        self._pid = os.getpid()
        atexit.register(self._at_exit)

    def sum(self, numbers: np.ndarray) -> None:
        """Sum an array of float64s over all processes, in place; bitwise equal on all. The shape is the same on all."""
        if self._room.shape != numbers.shape:
            self._room = np.empty_like(numbers)
        sent, received = numbers.view(np.uint8).data, self._room.view(np.uint8).data
        try:
            with np.errstate(all="ignore"):
                for rank, line in self._below.items():
                    _receive_into(rank, line, received)
                    np.add(numbers, self._room, out=numbers)
            if self._above is not None:
                rank, line = self._above
                _send(rank, line, sent)
                _receive_into(rank, line, sent)
            for rank, line in self._below.items():
                _send(rank, line, sent)
        except BaseException as error:
            self._close_by(error)
            raise

    def allgather(self, value: Any) -> list[Any]:
        """Return every process's value, by rank. Values can be anything that can be pickled."""
        try:
            found = {self.rank: pickle.dumps(value)}
            for rank, line in self._below.items():
                found |= pickle.loads(_receive(rank, line))
            everything: bytes | bytearray = pickle.dumps(found)
            if self._above is not None:
                _send(self._above[0], self._above[1], _LENGTH.pack(len(everything)), everything)
                everything = _receive(*self._above)
            for rank, line in self._below.items():
                _send(rank, line, _LENGTH.pack(len(everything)), everything)
        except BaseException as error:
            self._close_by(error)
            raise
        by_rank = pickle.loads(everything)
        return [pickle.loads(by_rank[rank]) for rank in range(self.processes)]

    def check_open(self) -> None:
        """Check that the connections are open.

        Raises:
          TCPTreeError: they are closed.
        """
        if self._why_closed:
            raise TCPTreeError(self._why_closed)

    def close(self, why: str) -> None:
        """Close the connections, which interrupts processes that wait at the other ends. `why`: for later errors."""
        self._why_closed = self._why_closed or why
        for _, line in self._lines:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()

    def _at_exit(self) -> None:
        """Close the connections when the process ends. If a process was lost, JAX's exit handler would wait for it and
        then abort (`heartbeat_timeout_seconds`, 100 by default); so end this process after a few seconds.
        """
        if os.getpid() != self._pid:
            return  # a forked child shares the sockets
        lost = bool(self._why_closed)
        self.close("its script is over")
        if lost:
            threading.Thread(target=_end_soon, name="adaptive-end", daemon=True).start()

    def _close_by(self, error: BaseException) -> None:
        """Close the connections after an error, because unread data of this operation would be read by the next one."""
        self.close(
            str(error) if isinstance(error, TCPTreeError) else f"a collective was aborted by {type(error).__name__}"
        )


_making = threading.Lock()


def process_tree() -> TCPTree:
    """Return this process's tree. The first call creates it, on all processes together.

    Raises:
      LaunchError: some processes did not call this in time, or the processes cannot connect to each other.
    """
    with _making:
        return _made_once()


@lru_cache(maxsize=1)
def _made_once() -> TCPTree:
    return TCPTree()


def _end_soon() -> None:
    time.sleep(_SECONDS_TO_END)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(_EXIT_STATUS)


def in_order_of_lines(values: Sequence[T], rank: int = 0) -> T:
    """Add values in the order of `TCPTree.sum`.

    Args:
      values: a value of each process, by rank; anything with `+`.
      rank: the root of the subtree to sum.
    """
    total = values[rank]
    for below in _neighbors(rank, len(values))[1]:
        total = total + in_order_of_lines(values, below)  # type: ignore[operator]
    return total


def _neighbors(rank: int, processes: int) -> tuple[int | None, range]:
    first = rank * BELOW + 1
    return (rank - 1) // BELOW if rank else None, range(min(first, processes), min(first + BELOW, processes))


# --- meeting for the first time ---------------------------------------------------------------------------------------


def _of_everyone(data: bytes) -> list[bytes]:
    """Gather each process's bytes, by rank, over XLA, because no other connection exists yet."""
    if len(data) > _ROOM:
        raise LaunchError(f"this host has too many addresses: {len(data)} bytes, but at most {_ROOM} can be sent.")
    first: dict[int, jax.Device] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    mesh = Mesh(np.array([first[rank] for rank in range(jax.process_count())]), ("process",))
    own = jax.device_put(np.frombuffer(data.ljust(_ROOM), np.uint8)[None], first[jax.process_index()])
    by_process, for_all = (NamedSharding(mesh, P(*axes)) for axes in (["process"], []))

    def gather() -> np.ndarray:
        shape = (jax.process_count(), _ROOM)
        joined = jax.make_array_from_single_device_arrays(shape, by_process, [own])
        return np.asarray(jax.jit(lambda x: x, out_shardings=for_all)(joined).addressable_shards[0].data)

    return [bytes(row).rstrip() for row in _in_time(gather)]


def _in_time(gather: Callable[[], np.ndarray]) -> np.ndarray:
    """Wait for all processes, in a thread that is abandoned if one does not come."""
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(gather())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=work, name="adaptive-first-gather", daemon=True)
    thread.start()
    thread.join(SECONDS_TO_COME)
    if not results:
        raise LaunchError(
            f"not all {jax.process_count()} processes of jax.distributed created a world within {SECONDS_TO_COME:g} s. "
            "All must run the same script, and call comm.world() at the same point."
        )
    if isinstance(results[0], Exception):
        raise LaunchError(
            f"the processes of jax.distributed cannot be connected: {str(results[0]).splitlines()[0]}. On CPUs, call "
            "jax.config.update('jax_cpu_collectives_implementation', 'gloo') before jax.distributed.initialize()."
        ) from results[0]
    return results[0]


def _connect(rank: int, secret: bytes, addresses: Sequence[tuple[str, int]], own: int) -> socket.socket:
    """Return a connection to the parent, at the first of its addresses that can be reached."""
    until, said = time.monotonic() + _SECONDS_TO_CONNECT, "it has only a loopback address"
    for host, port in addresses:
        seconds = max(1.0, (until - time.monotonic()) / len(addresses))
        try:
            line = socket.create_connection((host, port), timeout=seconds)
        except OSError as error:
            said = f"{host}:{port}: {error}"
            continue
        try:
            line.sendall(secret[:_SECRET] + _RANK.pack(own))
            if hmac.compare_digest(bytes(_read(line, _SECRET)), secret[_SECRET:]):
                return _set_up(line)
            said = f"another process listens at {host}:{port}"
        except (OSError, EOFError) as error:
            said = f"{host}:{port}: {error}"
        line.close()
    raise LaunchError(
        f"rank {own} cannot reach rank {rank} by TCP ({said}). The processes of a job must be able to connect to each "
        "other, on any port."
    )


def _admit(door: socket.socket, secret: bytes, below: Iterable[int]) -> dict[int, socket.socket]:
    """Return connections to the children, in the order of their ranks."""
    missing = set(below)
    come: dict[int, socket.socket] = {}
    until = time.monotonic() + 2 * _SECONDS_TO_CONNECT
    while missing:
        door.settimeout(max(0.01, until - time.monotonic()))
        try:
            line, _ = door.accept()
        except TimeoutError:
            for line in come.values():
                line.close()
            raise LaunchError(
                f"ranks {', '.join(map(str, sorted(missing)))} have not connected by TCP. The processes of a job must "
                "be able to connect to each other, on any port."
            ) from None
        with suppress(OSError, EOFError):
            line.settimeout(5.0)
            said = bytes(_read(line, _SECRET + _RANK.size))
            (rank,) = _RANK.unpack(said[_SECRET:])
            if hmac.compare_digest(said[:_SECRET], secret[:_SECRET]) and rank in missing:
                line.sendall(secret[_SECRET:])
                missing.remove(rank)
                come[rank] = _set_up(line)
                continue
        line.close()
    return dict(sorted(come.items()))


def _set_up(line: socket.socket) -> socket.socket:
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ending.give_up_after(line, _SECONDS_TO_NOTICE)
    return line


# --- bytes ------------------------------------------------------------------------------------------------------------


def _send(rank: int, line: socket.socket, *pieces: bytes | bytearray | memoryview) -> None:
    try:
        for piece in pieces:
            line.sendall(piece)
    except OSError as error:
        raise _gone(rank) from error


def _receive(rank: int, line: socket.socket) -> bytearray:
    length = bytearray(_LENGTH.size)
    _receive_into(rank, line, memoryview(length))
    value = bytearray(*_LENGTH.unpack(length))
    _receive_into(rank, line, memoryview(value))
    return value


def _receive_into(rank: int, line: socket.socket, room: memoryview) -> None:
    try:
        _fill(line, room)
    except (OSError, EOFError) as error:
        raise _gone(rank) from error


def _gone(rank: int) -> TCPTreeError:
    return TCPTreeError(f"rank {rank} has closed its connection: it ended, or lost another rank")


def _read(line: socket.socket, length: int) -> bytearray:
    room = bytearray(length)
    _fill(line, memoryview(room))
    return room


def _fill(line: socket.socket, room: memoryview) -> None:
    got = 0
    while got < len(room):
        n = line.recv_into(room[got:], 0, socket.MSG_WAITALL)
        if not n:
            raise EOFError("closed")
        got += n
