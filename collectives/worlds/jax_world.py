"""Workers on the devices of all processes that `jax.distributed` has joined: no MPI."""

from __future__ import annotations

import os
import pickle
import platform
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from threading import current_thread, get_ident
from typing import Any, NamedTuple, TypeVar
from warnings import warn
from zlib import crc32

import jax
import numpy as np

from adaptive import DisagreementError, WorkerError
from adaptive.extend import (
    Channels,
    PartSpec,
    WorkerMesh,
    allowed_cpus,
    chosen_threads,
    share_compilations,
    thread_status,
)

from .base import WorldBase, describe
from .devices import check_devices
from .launch import LaunchError
from .mailboxes.mailbox import Mailboxes, ProcessMailbox
from .oversubscription import OversubscriptionWarning, oversubscription
from .reducing.sharded import ONE_AT_A_TIME, Sharded
from .reducing.shared_memory import SharedMemorySum, shared_rows
from .transport.collective_lock import InTurn, PeerError
from .transport.disagreement import Intent, disagreement_error
from .transport.jax_channel import JaxChannel
from .transport.operations import CLOSE, FAILURE, FinalOperation, GatherBytes, Operation, StepOnMesh
from .transport.preamble import Preamble
from .transport.process_group import Process
from .transport.tcp_tree import TCPTree, TCPTreeError, lines
from .watchdog.settings import SECONDS, checked, introduce, watch
from .watchdog.stacks import this_process
from .watchdog.watchdog import Watchdog

_ONE_AFTER_ANOTHER = (
    "XLA has one order of collectives for all of a process. Run one program after another, or start the job under MPI, "
    "where programs in threads of their own can have a world each."
)


R = TypeVar("R")


class _ProcessInfo(NamedTuple):
    """What a process tells of itself when a world is made."""

    devices: list[int]  # by JAX's numbers
    host: tuple[str, str]  # processes with the same see each other's pids
    pid: int
    cpus: frozenset[int] | None  # that it may use, where it did not choose its number of threads


def _as_processes(everyone: Sequence[_ProcessInfo]) -> tuple[Process, ...]:
    """As they are known in other worlds."""
    hosts, found, first = [process.host for process in everyone], [], 0
    for process in everyone:
        seats = range(first, first + len(process.devices))
        found.append(Process(seats, process.host[0], hosts.index(process.host), process.pid))
        first = seats.stop
    return tuple(found)


class JaxWorld(Channels, InTurn, WorldBase):
    """One worker per device of every process that `jax.distributed` has joined; XLA carries the messages.

    What the workers send is reduced by one XLA program over the devices of all processes: by NCCL on GPUs, by gloo on
    CPUs; but on CPUs of one host in memory that all processes share (`by_memory.py`). Call
    `jax.distributed.initialize()` first; processes are numbered as there, and workers in the order of processes. Nobody
    comes, and nobody leaves: if a process is lost, the others end.

    All that processes do together begins with a frame (`frame.py`), on lines of their own (`lines.py`), so processes
    which are in different collectives are told. All worlds of a process share these, since XLA's collectives have one
    order: programs that run in threads of their own need MPI.

    Args:
      devices: this process's, one worker on each; need not be equally many on all. By default all local ones.
      hang_timeout: seconds for which a rank may keep the others waiting before it is taken for stuck, 0 for ever; the
        same on all ranks (`patience.py`).

    Attributes:
      waited: seconds in frames so far, which last until the last process has come. Local.

    Raises:
      LaunchError: `jax.distributed` is not initialised; or not all processes have come, or do not reach each other.
      CollectiveError: `hang_timeout` is no number of seconds.
      DisagreementError: it is not the same on all ranks. On every rank.

    Example:
      >>> import collectives as comm
      >>> comm.JaxWorld()
      Traceback (most recent call last):
      ...
      collectives.worlds.launch.LaunchError: JaxWorld needs jax.distributed.initialize(), before anything else of JAX's.
    """

    survives = False

    def __init__(self, devices: Sequence[jax.Device] | None = None, *, hang_timeout: float = SECONDS):
        WorldBase.__init__(self)
        Channels.__init__(self)
        self.hang_timeout = checked(hang_timeout)
        if not jax.distributed.is_initialized():
            raise LaunchError("JaxWorld needs jax.distributed.initialize(), before anything else of JAX's.")
        self.devices: Sequence[jax.Device] = tuple(jax.local_devices() if devices is None else devices)
        check_devices(self.devices)
        self._check_local()
        self._on_cpu = self.devices[0].platform == "cpu"
        self._lines: TCPTree = lines()
        # Of all worlds of this process, which share the lines.
        self._threads, self._lock = self._lines.threads, self._lines.lock
        self.rank, self.processes = self._lines.rank, self._lines.processes
        if self.processes > 1:
            share_compilations()  # what scripts compile before they build a program, too
        self._name = ""
        self._frame = Preamble()
        self._frame.of(self.processes)
        self._watch: Watchdog | None = None
        self._inside = False  # a collective that other processes are in too
        self._operation = Operation("", "", 0)  # the one that it is in, or behind: for the watch
        self._boards = Mailboxes()
        self.waited = 0.0
        everyone = self._introduced()
        by_id = {device.id: device for device in jax.devices(self.devices[0].platform)}
        counts = [len(process.devices) for process in everyone]
        self.capacity = sum(counts)
        self._everyone = _as_processes(everyone)
        self.workers = self._everyone[self.rank].seats
        of_all = [by_id[id] for process in everyone for id in process.devices]
        self._sharded = Sharded(of_all, self.devices, in_frame=len(self._frame.room))
        self._memory = self._shared_memory(everyone)
        if self._on_cpu and self.rank == 0:
            self._warn_if_oversubscribed(everyone)

    def channel(self, parts: Sequence[PartSpec], status: int, name: Hashable = 0) -> JaxChannel:
        """Return a channel for messages of one layout: the protocol of `World`."""
        return JaxChannel(self, parts, status)

    def worker_mesh(self) -> WorkerMesh | None:
        """Return the mesh of all devices, unless processes sum in memory that they share: the protocol of `OffersMesh`.

        Over gloo a sum takes several times as long as there.
        """
        return self._sharded if self._memory is None else None

    def run_on_mesh(self, program: Callable[[np.ndarray], R], status: np.ndarray, about: str = "", more: str = "") -> R:
        """Call `program` after a frame that carries the status: the protocol of `OffersMesh`.

        A process that has failed, or is in another collective, is noticed in the frame, before the others are in a
        program that they could not leave.
        """
        room = self._frame.room
        travelling = room[: len(status)] if len(status) <= len(room) else status.astype(np.float64)
        results: list[R] = []

        def run() -> None:
            if len(status) > len(room):
                self._lines.sum(travelling)
            with ONE_AT_A_TIME:
                results.append(program(travelling.astype(status.dtype)))

        with self._collective():
            travelling[:] = status
            self._do(StepOnMesh(about, more, run))
        return results.pop()

    def why_no_board(self) -> str:
        """Nothing speaks against it: the protocol of `OffersBoards`."""
        return ""

    def board(self, nbytes: Sequence[int], about: str, instead_of: Any = None) -> ProcessMailbox:
        """Make one: the protocol of `OffersBoards`."""
        making = self._boards.making(about, nbytes, lambda: self._everyone, instead_of)
        with self._collective():
            self._do(making)
        return self._boards.made(making.result, instead_of)

    def fail(self, why: str) -> None:
        """Make all other processes raise WorkerError, in whatever they do together now or next."""
        with suppress(PeerError), self._collective():
            self._do(Operation("", "", FAILURE, failure=why))

    def close(self) -> None:
        """Take leave of the others. All processes do so, at the end of their `with` blocks.

        Raises:
          DisagreementError: others are not at the end, but in a step, say. On every process.
        """
        if self._closed:
            return
        try:
            with self._collective():
                self._do(FinalOperation("the end of its world's block", self._parting, CLOSE))
        finally:
            self._boards.stop()
            super().close()
            self._end_watch()

    def _abandon(self, why: str) -> None:
        super()._abandon(why)
        self._boards.stop()
        self._end_watch(why)

    def _end_watch(self, why: str = "") -> None:
        if self._watch is not None:
            self._watch.close(why)

    def __repr__(self) -> str:
        own = f"worker {self.workers[0]}" if len(self.workers) == 1 else f"workers {self.workers[0]}–{self.workers[-1]}"
        which = f"rank {self.rank} of {self.processes}: {own} on {describe(self.devices)}"
        return f"JaxWorld({self.capacity} worker{'s' * (self.capacity > 1)}; {which})"

    # --- one operation after another ----------------------------------------------------------------------------------

    @thread_status("in a collective", exchanges=True)
    def _do(self, operation: Operation) -> None:
        """The frame, in which all see whether they are about the same; and if so, what it frames.

        Raises:
          WorkerError: another process has failed. On every process.
          DisagreementError: not all are about the same. On every process.
        """
        self._frame.announce(crc32(f"{self._name}: {operation.about}".encode(), operation.kind))
        self._operation = operation
        self._begun += 1
        self._inside = True
        came = time.perf_counter()
        try:
            self._lines.sum(self._frame.numbers)
        finally:  # also for one that did not come
            self.waited += time.perf_counter() - came
        if self._frame.heard() == self._frame.expected:
            operation.carry_out(self._lines)
            return
        everyone: list[Intent] = self._lines.allgather(self._presence(operation, self._name))
        self._inside = False
        # Nobody would come to what is left.
        self._closed = any(presence.leaves and presence.world == self._name for presence in everyone)
        if self._closed:
            self._end_watch()
        raise PeerError if operation.failure else disagreement_error(everyone, self.rank, _ONE_AFTER_ANOTHER)

    def _begin(self) -> None:
        self._check_open()
        try:
            self._lines.check_open()
        except TCPTreeError as closed:
            raise WorkerError(f"rank {self.rank} cannot reach the other ranks any more: {closed}.") from None
        self._threads.setdefault(get_ident(), current_thread().name)

    def _end_by(self, error: BaseException) -> None:
        """What did not come to its end, and the others may be in, cannot be gone on with."""
        if self._inside and not isinstance(error, PeerError | WorkerError | DisagreementError):
            self._lines.close(f"rank {self.rank} has left a collective before its end, by {type(error).__name__}")
        if isinstance(error, TCPTreeError | jax.errors.JaxRuntimeError):
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            where = f" in {self._operation.about}" if self._operation.about else ""
            raise WorkerError(
                f"rank {self.rank} of {self.processes} has lost the others{where}: {said}. Most likely another rank "
                "has failed: its own output says why."
            ) from error

    # --- making it ----------------------------------------------------------------------------------------------------

    def _check_local(self) -> None:
        own = jax.process_index()
        for device in self.devices:
            if device.process_index != own:
                raise ValueError(
                    f"devices= names {device}, which is process {device.process_index}'s, and this is process {own}. "
                    "Each process gives its own, such as those of jax.local_devices()."
                )

    def _introduced(self) -> list[_ProcessInfo]:
        """Who all processes are, by rank; from here on they watch whether the others come. Communicates."""
        cpus = None if chosen_threads() else allowed_cpus()
        host = platform.node(), this_process().space
        told = pickle.dumps(_ProcessInfo([device.id for device in self.devices], host, os.getpid(), cpus))
        with self._collective():
            self._name = f"world {self._lines.worlds + 1}"
            gather = GatherBytes(told, about := f"making {self._name} of jax.distributed's processes", "")
            self._do(gather)
            self._lines.worlds += 1
        everyone: list[_ProcessInfo] = [pickle.loads(p) for p in gather.result]
        group = [process.host for process in everyone].index(host)
        peer, datagrams = introduce(self.rank, group, self.hang_timeout)
        peers = [pickle.loads(p) for p in self.all_gather_bytes(pickle.dumps(peer), about)]
        self._watch = watch(self, peers, self.rank, datagrams, lambda status: None)  # each process ends by itself
        return everyone

    def _shared_memory(self, everyone: Sequence[_ProcessInfo]) -> SharedMemorySum | None:
        """The way through memory, where all processes are on one host and compute on CPUs. Communicates."""
        about = "sharing memory with the others"
        hosts = [process.host for process in everyone]
        rows = shared_rows(self.rank, hosts, lambda told: self.all_gather_bytes(told, about), wanted=self._on_cpu)
        nothing = np.zeros(1)
        return None if rows is None else SharedMemorySum(rows, self.rank, lambda: self._lines.sum(nothing))

    def _warn_if_oversubscribed(self, everyone: Sequence[_ProcessInfo]) -> None:
        for host in dict.fromkeys(process.host for process in everyone):
            advice = oversubscription([p.cpus for p in everyone if p.host == host and p.cpus is not None])
            if advice:
                warn(advice, OversubscriptionWarning, stacklevel=3)
                return
