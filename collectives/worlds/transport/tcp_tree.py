"""A tree of TCP connections between the processes of `jax.distributed`, for small sums on the host.

XLA matches collectives only by their order, and waits silently, even forever, in one that some process does not enter.
Processes therefore first agree without XLA: by TCP, along a tree, from each process to its parent and back. The
smallest XLA collective over gloo took 0.3 to 3.5 ms, and a value through the coordinator's key-value store 0.5 ms (two
cores of one host). On GPUs a collective would wait for the stream.

When a process ends, its connections close. Processes that wait on them notice at once and close theirs, so all notice.

A process has one tree for all of its worlds, because XLA runs the collectives of all its programs in one order.
"""

from __future__ import annotations

import atexit
import os
import pickle
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collectives.worlds.connections import Address, accept, addresses_of, connect, shut_down
from collectives.worlds.launch import LaunchError

BELOW = 8  # children of a process, at most: up to nine processes are a star
SECONDS_TO_COME = 300.0  # for all processes to create their first world; JAX's own timeout at the start
_SECONDS_TO_CONNECT = 30.0
_SECONDS_TO_END = 5.0  # for exit handlers, if a process was lost
_ROOM = 4096  # bytes for the addresses that a process announces at the start
_CONNECT = "The processes of a job must be able to connect to each other, on any port."


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
        self.lock, self.worlds, self._why_closed = threading.Lock(), 0, ""
        self.threads: dict[int, str] = {}
        above, first = [(self.rank - 1) // BELOW] if self.rank else [], self.rank * BELOW + 1
        with socket.create_server(("", 0), backlog=BELOW) as door:
            key = secrets.token_bytes(32)
            announced = _of_everyone(pickle.dumps((addresses_of(door), key)))
            self._above = {rank: _connect(self.rank, rank, *pickle.loads(announced[rank])) for rank in above}
            self._below = _admit(door, key, range(first, min(first + BELOW, self.processes)))
        self._pid = os.getpid()
        atexit.register(self._at_exit)

    def sum(self, numbers: np.ndarray) -> None:
        """Sum an array of float64s over all processes, in place; bitwise equal on all. The shape is the same on all."""

        def total(of_children: list[bytes]) -> memoryview:
            for data in of_children:
                np.add(numbers, np.frombuffer(data), out=numbers)
            return numbers.data

        with np.errstate(all="ignore"):
            numbers[:] = np.frombuffer(self._of_all(total))

    def allgather(self, value: Any) -> list[Any]:
        """Return every process's value, by rank. Values can be anything that can be pickled."""

        def found(of_children: list[bytes]) -> bytes:
            by_rank = {self.rank: pickle.dumps(value)}
            for data in of_children:
                by_rank.update(pickle.loads(data))
            return pickle.dumps(by_rank)

        by_rank = pickle.loads(self._of_all(found))
        return [pickle.loads(by_rank[rank]) for rank in range(self.processes)]

    def _of_all(self, total: Callable[[list[bytes]], bytes | memoryview]) -> bytes | memoryview:
        """Return the root's total, after each process has added the totals of its children.

        The connections are closed upon an error, because unread data would be read by the next operation.
        """
        if self._why_closed:
            raise TCPTreeError(self._why_closed)
        of_children = []
        try:
            for line in self._below.values():
                of_children.append(line.recv_bytes())  # noqa: PERF401  (an error needs `line`)
            data = total(of_children)
            for line in self._above.values():
                line.send_bytes(data)
                data = line.recv_bytes()
            for line in self._below.values():
                line.send_bytes(data)
        except (OSError, EOFError) as error:
            peer = next(rank for rank, other in (self._below | self._above).items() if other is line)
            self.close(f"rank {peer} has closed its connection: it ended, or lost another rank")
            raise TCPTreeError(self._why_closed) from error
        except BaseException as error:
            self.close(f"a collective was aborted by {type(error).__name__}")
            raise
        return data

    def close(self, why: str) -> None:
        """Close the connections, which interrupts processes that wait at the other ends. `why`: for later errors."""
        self._why_closed = self._why_closed or why
        for line in (*self._below.values(), *self._above.values()):
            shut_down(line)
            line.close()

    def _at_exit(self) -> None:
        """Close the connections when the process ends. If a process was lost, JAX's exit handler would wait for it and
        then abort (`heartbeat_timeout_seconds`, 100 by default); so end this process after a few seconds.
        """
        if os.getpid() != self._pid:
            return  # a forked child shares the sockets
        if self._why_closed:
            threading.Thread(target=_end_soon, name="adaptive-end", daemon=True).start()
        self.close("its script is over")


process_tree = cache(TCPTree)  # all worlds of a process share one tree, which the first of them creates


def _end_soon() -> None:
    time.sleep(_SECONDS_TO_END)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(1)


# --- meeting for the first time ---------------------------------------------------------------------------------------


def _of_everyone(data: bytes) -> list[bytes]:
    """Gather each process's bytes, at most `_ROOM`, by rank, over XLA, because no other connection exists yet."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([first[rank] for rank in range(jax.process_count())]), ("process",))
    own = jax.device_put(np.frombuffer(data.ljust(_ROOM, b"\0"), np.uint8)[None], first[jax.process_index()])
    by_process, for_all = (NamedSharding(mesh, P(*axes)) for axes in (["process"], []))

    def gather() -> None:
        try:
            shape = (jax.process_count(), _ROOM)
            joined = jax.make_array_from_single_device_arrays(shape, by_process, [own])
            found.set_result(np.asarray(jax.jit(lambda x: x, out_shardings=for_all)(joined).addressable_data(0)))
        except Exception as error:
            found.set_exception(error)

    found: Future[np.ndarray] = Future()
    # The thread is abandoned if a process does not come.
    threading.Thread(target=gather, name="adaptive-first-gather", daemon=True).start()
    try:
        return [bytes(row) for row in found.result(SECONDS_TO_COME)]
    except TimeoutError:
        raise LaunchError(
            f"not all {jax.process_count()} processes of jax.distributed created a world within {SECONDS_TO_COME:g} s. "
            "All must run the same script, and call comm.world() at the same point."
        ) from None
    except Exception as error:
        raise LaunchError(
            f"the processes of jax.distributed cannot be connected: {str(error).splitlines()[0]}. On CPUs, call "
            "jax.config.update('jax_cpu_collectives_implementation', 'gloo') before jax.distributed.initialize()."
        ) from error


def _connect(own: int, rank: int, addresses: Sequence[Address], key: bytes) -> Connection:
    """Return a connection of process `own` to its parent, `rank`."""
    try:
        line = connect(addresses, key, _SECONDS_TO_CONNECT)
        line.send(own)
    except OSError as error:
        raise LaunchError(f"rank {own} cannot reach rank {rank} by TCP ({error}). {_CONNECT}") from error
    return line


def _admit(door: socket.socket, key: bytes, below: Sequence[int]) -> dict[int, Connection]:
    """Return connections to the children, in the order of their ranks."""
    found, until = dict[int, Connection](), time.monotonic() + 2 * _SECONDS_TO_CONNECT
    while missing := [str(rank) for rank in below if rank not in found]:
        door.settimeout(max(0.01, until - time.monotonic()))
        try:
            line = accept(door, key)
            found[line.recv()] = line
        except TimeoutError:
            raise LaunchError(f"ranks {', '.join(missing)} have not connected by TCP. {_CONNECT}") from None
        except (OSError, EOFError):
            continue  # a stranger
    return {rank: found[rank] for rank in below}
