"""A world without MPI: workers on the devices of all processes of `jax.distributed`."""

from __future__ import annotations

import os
import pickle
import platform
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar
from zlib import crc32

import jax
import numpy as np

from adaptive.base.channel import PartSpec
from adaptive.base.process.cores import allowed_cpus, chosen_threads
from adaptive.base.worker_mesh import WorkerMesh
from adaptive.extend import share_compilations

from .base import describe
from .devices import MeshChannel, checked_devices
from .launch import LaunchError, warn_about_cores
from .multi_process import MultiProcessWorld
from .reducing.sharded import ONE_AT_A_TIME, Sharded
from .transport.jax_transport import JaxTransport
from .transport.operations import ROOM, RunOnce
from .transport.process_group import as_processes
from .transport.tcp_tree import process_tree
from .watchdog import Watchdog, be_seen, check_same, pid_space

R = TypeVar("R")


class JaxWorld(MultiProcessWorld):
    """One worker per device of every process of `jax.distributed`, without MPI.

    Messages are reduced by one XLA program over the devices of all processes: by NCCL on GPUs, by gloo on CPUs. Call
    `jax.distributed.initialize()` first. Ranks are JAX's process indices; workers are numbered in the order of ranks.
    Processes neither join nor leave; if one is lost, the others end. On the CPUs of one host, MPI or the devices of one
    process exchange messages several times as fast as gloo.

    Each operation begins with a preamble (`transport/transport.py`) over TCP (`transport/tcp_tree.py`), which detects
    processes in different collectives. All worlds of a process share these connections, because XLA runs the
    collectives of a process in one order. Programs in several threads therefore need MPI.

    Args:
      devices: the devices of this process, one worker on each; processes may have different numbers. By default all
        local devices.
      hang_timeout: see `world`.

    Attributes:
      waited: seconds spent in preambles so far, that is, waiting for the last process. Local.
      transport: performs the operations of the processes.
      sharded: reduces parts over the devices of all processes.
      watchdog: has stuck ranks detected; None if hang_timeout is 0 or this process is the only one.

    Raises:
      LaunchError: `jax.distributed` is not initialized, or some processes create no world or cannot be reached.
      CollectiveError: `hang_timeout` is not a number of seconds.
      DisagreementError: `hang_timeout` differs between ranks. On every rank.
      ValueError: `devices` is empty, or contains a device twice or of another process.

    Example:
      >>> import collectives as comm
      >>> comm.JaxWorld()
      Traceback (most recent call last):
      ...
      collectives.worlds.launch.LaunchError: JaxWorld needs jax.distributed.initialize() before any other use of JAX.
    """

    transport: JaxTransport

    def __init__(self, devices: Sequence[jax.Device] | None = None, *, hang_timeout: float | None = None):
        super().__init__(hang_timeout)
        if not jax.distributed.is_initialized():
            raise LaunchError("JaxWorld needs jax.distributed.initialize() before any other use of JAX.")
        self.devices = checked_devices(jax.local_devices() if devices is None else devices)
        self.transport = JaxTransport(self.lifetime, process_tree())
        if self.processes > 1:
            share_compilations()  # already here, for compilations before a program is built
        ids, cpus = self._meet()
        by_id = {device.id: device for device in jax.devices(self.devices[0].platform)}
        self.capacity = self.everyone[-1].worker_slots.stop
        self.workers = self.everyone[self.rank].worker_slots
        self.sharded = Sharded([by_id[id] for own in ids for id in own], self.devices)
        if self.devices[0].platform == "cpu" and self.rank == 0:
            warn_about_cores(self.everyone, cpus)

    def channel(self, parts: Sequence[PartSpec], status: int, name: Hashable = 0) -> MeshChannel:
        """Return a channel for messages of one layout: see `World.channel`."""
        return MeshChannel(self, self.sharded, parts, status)

    def worker_mesh(self) -> WorkerMesh:
        """Return the mesh of all devices: see `World`."""
        return self.sharded

    def run_on_mesh(
        self, program: Callable[[np.ndarray], R], status: np.ndarray, about: str = "", more: str = "", layout: str = ""
    ) -> R:
        """Call `program` after a preamble that carries the status: see `World`.

        The preamble detects processes that have failed or are in another collective, before the others enter an XLA
        program, which could not be interrupted.
        """
        transport = self.transport
        results: list[R] = []

        def run() -> None:
            if len(status) > ROOM:
                transport.sum(traveling)
            with ONE_AT_A_TIME:
                results.append(program(traveling.astype(status.dtype)))

        text = layout or "one program over the devices of all processes"
        operation = RunOnce(about, more, crc32(text.encode()), text, run)
        traveling = operation.room[: len(status)] if len(status) <= ROOM else status.astype(np.float64)
        traveling[:] = status
        transport.run(operation)
        return results.pop()

    def __repr__(self) -> str:
        which = f"rank {self.rank} of {self.processes}: {self.workers_in_words} on {describe(self.devices)}"
        return f"JaxWorld({self.capacity} worker{'s' * (self.capacity > 1)}; {which})"

    def _meet(self) -> tuple[list[list[int]], list[frozenset[int] | None]]:
        """Learn of all processes, and start the watchdog. Communicates.

        Returns:
          For each process the numbers of its devices in JAX, and the cores that it may use, None if its number of
          threads is set.
        """
        transport = self.transport
        cpus = None if chosen_threads() else allowed_cpus()
        space = platform.node(), pid_space()  # equal on processes that see each other's pids
        own = [device.id for device in self.devices], cpus, space, os.getpid(), self._hang_timeout
        be_seen(self._hang_timeout)
        transport.world = f"world {transport.comm.worlds + 1}"
        gathered = self.all_gather_bytes(pickle.dumps(own), f"making {transport.world} of jax.distributed's processes")
        transport.comm.worlds += 1
        ids, all_cpus, spaces, pids, hang_timeouts = zip(*map(pickle.loads, gathered), strict=True)
        check_same(hang_timeouts)
        hosts = [spaces.index(each) for each in spaces]
        self.everyone = as_processes(zip(map(len, ids), (node for node, _ in spaces), hosts, pids, strict=True))
        if self._hang_timeout != 0 and self.processes > 1:
            transport.watchdog = Watchdog(transport, self._hang_timeout, lambda status: None)
            transport.watchdog.watch(("of jax", transport.world), self.everyone, self.rank)
        return list(ids), list(all_cpus)
