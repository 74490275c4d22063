"""A world without MPI: workers on the devices of all processes of `jax.distributed`."""

from __future__ import annotations

import os
import pickle
import platform
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar
from warnings import warn

import jax
import numpy as np

from adaptive.base.channel import PartSpec
from adaptive.base.cores import allowed_cpus, chosen_threads
from adaptive.base.worker_mesh import WorkerMesh
from adaptive.extend import share_compilations

from .base import describe
from .devices import check_devices
from .launch import LaunchError
from .multi_process import MultiProcessWorld
from .oversubscription import OversubscriptionWarning, oversubscription
from .reducing.sharded import ONE_AT_A_TIME, Sharded
from .transport.jax_channel import JaxChannel
from .transport.jax_transport import JaxTransport
from .transport.operations import CLOSE, ON_MESH, ROOM, FinalOperation, GatherBytes, RunOnce
from .transport.process_group import Process
from .transport.tcp_tree import process_tree
from .watchdog.settings import introduce, start_watchdog
from .watchdog.stacks import this_process

R = TypeVar("R")


class _ProcessInfo(NamedTuple):
    """The facts that a process sends to the others when a world is created."""

    devices: list[int]  # their ids in JAX
    host: tuple[str, str]  # equal on processes that see each other's pids
    pid: int
    cpus: frozenset[int] | None  # that it may use; None if its number of threads is set


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
      hang_timeout: seconds for which a rank may keep the others waiting before it is reported as stuck; 0: no limit;
        None: a time that depends on what it does (`watchdog/limits.py`).
        The same on all ranks (`watchdog/settings.py`).

    Attributes:
      waited: seconds spent in preambles so far, that is, waiting for the last process. Local.
      transport: performs the operations of the processes.
      sharded: reduces parts over the devices of all processes.
      watchdog: the thread that detects stuck ranks; None if hang_timeout is 0 or this process is the only one.

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
        self.devices: Sequence[jax.Device] = tuple(jax.local_devices() if devices is None else devices)
        check_devices(self.devices)
        _check_local(self.devices)
        on_cpu = self.devices[0].platform == "cpu"
        self.transport = JaxTransport(self.lifetime, process_tree())
        if self.processes > 1:
            share_compilations()  # already here, for compilations before a program is built
        infos = self._exchange_infos()
        by_id = {device.id: device for device in jax.devices(self.devices[0].platform)}
        self.capacity = sum(len(info.devices) for info in infos)
        self.everyone = _as_processes(infos)
        self.workers = self.everyone[self.rank].worker_slots
        of_all = [by_id[id] for info in infos for id in info.devices]
        self.sharded = Sharded(of_all, self.devices, in_preamble=ROOM)
        if on_cpu and self.rank == 0:
            _warn_if_oversubscribed(infos)

    def channel(self, parts: Sequence[PartSpec], status: int, name: Hashable = 0) -> JaxChannel:
        """Return a channel for messages of one layout: see `World.channel`."""
        return JaxChannel(self, parts, status)

    def worker_mesh(self) -> WorkerMesh:
        """Return the mesh of all devices: see `World`."""
        return self.sharded

    def run_on_mesh(self, program: Callable[[np.ndarray], R], status: np.ndarray, about: str = "", more: str = "") -> R:
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

        operation = RunOnce(about, more, ON_MESH, "one program over the devices of all processes", run)
        traveling = operation.room[: len(status)] if len(status) <= ROOM else status.astype(np.float64)
        traveling[:] = status
        transport.run(operation)
        return results.pop()

    def close(self) -> None:
        """Close the world on all processes. Called by all of them at the end of their `with` blocks.

        Raises:
          DisagreementError: another process is not at the end of its block. On every process.
        """
        if self.lifetime.closed:
            return
        try:
            self.transport.run(FinalOperation("the end of its world's block", self.lifetime.exit_reason, CLOSE))
        finally:
            self._mailboxes.stop()
            super().close()
            self._end_watchdog()

    def __repr__(self) -> str:
        own = f"worker {self.workers[0]}" if len(self.workers) == 1 else f"workers {self.workers[0]}–{self.workers[-1]}"
        which = f"rank {self.rank} of {self.processes}: {own} on {describe(self.devices)}"
        return f"JaxWorld({self.capacity} worker{'s' * (self.capacity > 1)}; {which})"

    def _exchange_infos(self) -> list[_ProcessInfo]:
        """Exchange facts about all processes, start the watchdog, and return the facts by rank. Communicates."""
        transport = self.transport
        cpus = None if chosen_threads() else allowed_cpus()
        host = platform.node(), this_process().space
        own = pickle.dumps(_ProcessInfo([device.id for device in self.devices], host, os.getpid(), cpus))
        transport.world = f"world {transport.comm.worlds + 1}"
        gather = GatherBytes(own, about := f"making {transport.world} of jax.distributed's processes", "")
        transport.run(gather)
        transport.comm.worlds += 1
        infos: list[_ProcessInfo] = [pickle.loads(p) for p in gather.result]
        group = [info.host for info in infos].index(host)
        peer, socket = introduce(self.rank, group, self._hang_timeout)
        peers = [pickle.loads(p) for p in self.all_gather_bytes(pickle.dumps(peer), about)]
        abort = _nothing_to_abort
        self.watchdog = transport.watchdog = start_watchdog(transport, peers, self.rank, socket, abort)
        return infos


def _nothing_to_abort(status: int) -> None:
    """Abort the other processes: does nothing, because each of them ends by itself."""


def _as_processes(infos: Sequence[_ProcessInfo]) -> tuple[Process, ...]:
    hosts, found, first = [info.host for info in infos], [], 0
    for info in infos:
        slots = range(first, first + len(info.devices))
        found.append(Process(slots, info.host[0], hosts.index(info.host), info.pid))
        first = slots.stop
    return tuple(found)


def _check_local(devices: Sequence[jax.Device]) -> None:
    own = jax.process_index()
    for device in devices:
        if device.process_index != own:
            raise ValueError(
                f"devices= contains {device}, which belongs to process {device.process_index}; this is process {own}. "
                "Pass devices of this process, for example jax.local_devices()."
            )


def _warn_if_oversubscribed(infos: Sequence[_ProcessInfo]) -> None:
    for host in dict.fromkeys(info.host for info in infos):
        advice = oversubscription([info.cpus for info in infos if info.host == host and info.cpus is not None])
        if advice:
            warn(advice, OversubscriptionWarning, stacklevel=3)
            return
