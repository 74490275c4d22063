"""Workers as MPI processes. All of MPI is in this file, and what it hands to those beside it."""

from __future__ import annotations

import sys
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock, current_thread, get_ident
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn
from warnings import warn
from zlib import crc32

import jax
import numpy as np

from adaptive import CollectiveError, WorkerError
from adaptive.extend import (
    Channels,
    MembersChanged,
    PartSpec,
    allowed_cpus,
    chosen_threads,
    launcher,
    share_compilations,
    thread_status,
)
from launchers import ending

from .base import WorldBase, describe
from .devices import DeviceWorld, check_devices
from .elastic.elastic_processes import ElasticProcesses
from .elastic.spawning import recruited
from .launch import check_agreement, no_mpi
from .mailboxes import mailbox as boards
from .oversubscription import OversubscriptionWarning, oversubscription
from .reducing import cuda_aware as on_accelerators
from .reducing.algorithms import FLAT_PIECE_BYTES, Algorithms, multi_host_algorithms
from .reducing.cuda_aware import CudaAwareSums, says_cuda
from .transport.collective_lock import InTurn, PeerError
from .transport.disagreement import disagreement_error
from .transport.mpi_channel import MPIChannel
from .transport.operations import CLOSE, FAILURE, FinalOperation, Operation
from .transport.preamble import Preamble
from .transport.process_group import ProcessGroup, all_processes
from .transport.repair import all_agree, enabled, prepare, repaired, survives
from .watchdog.settings import SECONDS, checked, introduce, watch
from .watchdog.watchdog import Watchdog

if TYPE_CHECKING:
    from mpi4py import MPI

# An Allreduce takes this much at a time where all ranks are on one host: pieces stay in the caches between the copy
# from the other rank, the sum and the copy back. ResNet-50's gradients between two ranks (medians, in ms): 23 in pieces
# of 64 kB, 18 of 128, 16.5 of 256, 15.4 of 512, 16.5 of 1024, 17.7 of 4096, 20 as whole tensors; with two to four in
# flight as Iallreduce, 1.2 to 1.3 times as long (benchmarks/exchange_resnet50.py). Across hosts: see `ways.py`.
PIECE_BYTES = 512 << 10

_making = Lock()  # duplicating a communicator is a collective on it, which two threads must not do at once


class MPIWorld(Channels, InTurn, ElasticProcesses, WorldBase):
    """One worker per MPI rank, or one per local device: then a sum over the process's devices comes first.

    Args:
      comm: an mpi4py communicator, of which this world uses a duplicate; COMM_WORLD by default.
      devices: this process's, one worker on each; need not be equally many on all ranks. By default one: JAX's first
        CPU, or, where there are several accelerators, the one that belongs to this rank among those of its host.
      workers: how many take part at first, of whole processes; the others are in reserve. By default all.
      min_workers: with fewer workers left, all stop; and no program can ask for fewer.
      max_workers: how many workers there may be: where a program asks for more than processes were started, others are
        spawned. Seats for all of them are planned from the start.
      respawn: whether workers that are lost, or told to go, are replaced: from the reserve, or by spawning.
      lost: "continue" without the processes that are lost, or "stop". By default it goes on where the job was started
        so that it can: by Open MPI's `mpirun --with-ft ulfm`.
      hang_timeout: seconds for which a rank may keep the others waiting before it is taken for stuck, 0 for ever; the
        same on all ranks (`patience.py`).

    All that processes do together begins with a frame (`frame.py`), so that ranks which are in different collectives
    are told. Threads may share a world, one of them is in a collective at a time; programs that run in threads of their
    own need a world each, since which of them comes first is not the same on all ranks.

    Attributes:
      rank, processes: of those that are together now. When processes are lost, the others are numbered anew, in their
        old order.
      waited: seconds in frames so far, which last until the last rank has come. Local.
      library: what MPI says of itself.

    Raises:
      LaunchError: MPI cannot be loaded, or is not that of the launcher; or losses are to be survived, and cannot be.
      WorkerCountError: there cannot be so many workers, or so few.
      CollectiveError: `hang_timeout` is no number of seconds.
      DisagreementError: it is not the same on all ranks. On every rank.
    """

    def __init__(
        self,
        comm: MPI.Comm | None = None,
        devices: Sequence[jax.Device] | None = None,
        *,
        workers: int | None = None,
        min_workers: int = 1,
        max_workers: int | None = None,
        respawn: bool = False,
        lost: str | None = None,
        hang_timeout: float = SECONDS,
    ):
        WorldBase.__init__(self)
        Channels.__init__(self)
        self.hang_timeout = checked(hang_timeout)
        self._boards = boards.Mailboxes()
        self._lock = Lock()
        self._threads: dict[int, str] = {}  # that have used this world
        self._inside = False  # a collective that other processes are in too
        self._torn = False  # one that this process has left, and others have not
        self._completed, self._last = 0, Operation("", "", 0)  # how many operations, and the last of them
        self._left: tuple[ProcessGroup, tuple[str, float]] | None = None  # who is together from the next operation on
        self.waited = 0.0
        self._operation = self._last  # the one that it is in, or behind: for the watch
        self._frame = Preamble()
        self._watch: Watchdog | None = None
        self._ways: Algorithms | None = None
        self.respawn, self.spawns = respawn, max_workers is not None
        with ending.making_world(of_all=comm is None), _as_worker_error():
            self._mpi = mpi = _load(devices)
            self.library: str = mpi.Get_library_version().strip("\0\n ").splitlines()[0]
            if comm is None:
                check_agreement(mpi.COMM_WORLD.size, self.library)
            self.survives = survives(lost)
            offered = recruited(mpi) if comm is None else None
            with _making:
                whole = (mpi.COMM_WORLD if comm is None else comm).Dup()
            whole.Set_errhandler(mpi.ERRORS_RETURN)  # errors become exceptions, whatever the user's communicator does
            if whole.size > 1:
                share_compilations()  # what scripts compile before they build a program, too
            host = whole.Split_type(mpi.COMM_TYPE_SHARED)
            self.devices: Sequence[jax.Device] = (_default_device(host.rank),) if devices is None else tuple(devices)
            check_devices(self.devices)
            self._local = DeviceWorld(self.devices)
            self._ops = {"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN}
            self._on_devices = CudaAwareSums(mpi, self.devices[0])
            everyone = ProcessGroup(whole, all_processes(whole, host, len(self.devices)))
            if offered is None:
                self._start_staff(everyone, workers, min_workers, max_workers)
            else:
                everyone = self._start_recruit(everyone, *offered, min_workers)
            if self.devices[0].platform == "cpu":
                self._warn_if_oversubscribed(host)
            host.Free()
            self._start_watch(everyone)
            ending.world_made()
            if self.survives and not all_agree(mpi, whole, True):
                ending.world_ended()
                raise WorkerError("A process was lost while comm.world() was made, before losses are survived.")

    def channel(self, parts: Sequence[PartSpec], status: int, name: Hashable = 0) -> MPIChannel:
        """Return a channel for messages of one layout: the protocol of `World`."""
        return MPIChannel(self, parts, status, name)

    def algorithm(self, channel: Hashable) -> str:
        """How messages of a channel go, over several hosts or from GPUs, in words: the protocol of `World`."""
        between_hosts = "" if self._ways is None else self._ways.in_words(channel)
        return "; ".join(filter(None, [self._on_devices.in_words(channel), between_hosts]))

    @property
    def cuda_aware(self) -> bool:
        """Whether MPI says that it takes the memory of NVIDIA's GPUs. Local."""
        return says_cuda(self._mpi)

    def why_no_board(self) -> str:
        """Why there can be none: the protocol of `OffersBoards`."""
        return boards.why_none(self._mpi)

    def board(self, nbytes: Sequence[int], about: str, instead_of: Any = None) -> boards.ProcessMailbox:
        """Make one: the protocol of `OffersBoards`. Of MPI's windows where nobody can be lost, and nobody comes in."""
        windows = None if self.survives or self.spawns else self._mpi
        making = self._boards.making(about, nbytes, lambda: self._together.everyone, instead_of, windows)
        with self._collective():
            self._do(making)
        return self._boards.made(making.result, instead_of)

    def fail(self, why: str) -> None:
        """Make all other processes raise WorkerError, in whatever they do together now or next."""
        if self.in_reserve:
            return  # the workers do not depend on it
        self._tell_reserve(why)
        with suppress(PeerError), self._collective():
            self._do(Operation("", "", FAILURE, failure=why))

    def close(self) -> None:
        """Free the communicator. All processes do so, at the end of their `with` blocks.

        Raises:
          DisagreementError: others are not at the end, but in a step, say. On every process.
        """
        if self._closed:
            return
        try:
            self._dismiss_reserve()
            with self._collective():
                self._do(FinalOperation("the end of its world's block", self._parting, CLOSE))
                with suppress(self._mpi.Exception):  # somebody was lost behind the end: what matters is done
                    if self._ways is not None:
                        self._ways.free()
                    self._boards.free_among(self._together.everyone)
                    self.comm.Free()
            ending.world_ended()
        finally:
            self._on_devices.close()
            self._kept.clear()
            self._boards.stop()
            super().close()
            self._end_watch()

    def _abandon(self, why: str) -> None:
        super()._abandon(why)
        self._boards.stop()
        self._end_watch(why)

    def _start_watch(self, those: ProcessGroup) -> None:
        rank = those.comm.rank
        peer, datagrams = introduce(rank, those.everyone[rank].host, self.hang_timeout)
        peers = those.comm.allgather(peer)
        self._peers = dict(zip(those.everyone, peers, strict=True))
        self._watch = watch(self, peers, rank, datagrams, partial(_abort, self._mpi))

    def _watch_over(self, those: ProcessGroup) -> None:
        """Watch whether these come, from now on."""
        if self._watch is not None:
            # Whoever was spawned has no watch.
            self._watch.keep([self._peers[process] for process in those.everyone if process in self._peers])

    def _end_watch(self, why: str = "") -> None:
        if self._watch is not None:
            self._watch.close(why)

    def __repr__(self) -> str:
        there = len(self.members)
        s, of = "s" * (there > 1), f" on {self.capacity} seats" if there < self.capacity else ""
        own = f"worker {self.workers[0]}" if len(self.workers) == 1 else f"workers {self.workers[0]}–{self.workers[-1]}"
        which = "in reserve" if self.in_reserve else f"rank {self.rank} of {self.processes}"
        return f"MPIWorld({there} worker{s}{of}; {which}: {own} on {describe(self.devices)})"

    # --- one operation after another ----------------------------------------------------------------------------------

    @thread_status("in a collective", exchanges=True)
    def _do(self, operation: Operation) -> None:
        """Have an operation completed, on all processes that survive it: see `operations.py`.

        Raises:
          MembersChanged: processes were lost in it, and it cannot just be repeated. On every process.
          WorkerError: they were, and too few are left; or another process has failed. On every process.
          DisagreementError: not all are about the same. On every process.
        """
        completed = False
        while not completed:
            changed = self._left is not None
            if self._left is not None:
                self._go_on(*self._left)
            if changed and not operation.repeats:
                self._inside = False
                raise MembersChanged
            error: Exception | None = None
            try:
                self._framed(operation)
            except Exception as lost:  # not only MPI's: what came from one that has died may be no pickle, say
                error = lost
            completed = self._settled(operation, error)
        self._completed += 1
        self._last = operation
        if operation.presences is not None:
            self._disagree(operation)

    def _framed(self, operation: Operation) -> None:
        """The frame, in which all see whether they are about the same; and if so, what it frames."""
        operation.presences = None
        self._frame.announce(crc32(operation.about.encode(), operation.kind))
        self._operation = operation
        self._begun += 1
        self._inside = True
        came = time.perf_counter()
        try:
            self.comm.Allreduce(self._mpi.IN_PLACE, self._frame.numbers)
        finally:  # also for one that did not come
            self.waited += time.perf_counter() - came
        if self._frame.heard() == self._frame.expected:
            operation.carry_out(self.comm)
        else:
            self._tell_presence(operation)

    def _tell_presence(self, operation: Operation) -> None:
        """Tell the others what this process is about, and hear it of them, where that is not the same."""
        operation.rank = self.rank
        operation.presences = self.comm.allgather(self._presence(operation))

    def _settled(self, operation: Operation, error: Exception | None) -> bool:
        """Settle with the others whether an attempt at an operation counts, where one of them may have been lost.

        Args:
          error: by which this process's attempt ended; `None` if it was completed.

        Returns:
          Whether the operation is completed. If not, `_left` are those who go on.

        Raises:
          Exception: `error`, where losses are not survived, or nobody was lost.
        """
        if error is not None:
            if not self.survives:
                raise error
            with suppress(self._mpi.Exception):
                self.comm.Revoke()
            if self._ways is not None:
                self._ways.revoke()
        elif not operation.agreed or not self.survives or operation.presences is not None:
            return True
        # All whose attempt has failed come here, whatever it was, since some may have completed what all agree on.
        if all_agree(self._mpi, self.comm, error is None):
            return True
        return self._repair(operation, error or self._mpi.Exception(self._mpi.ERR_PROC_FAILED))

    def _disagree(self, operation: Operation) -> NoReturn:
        """Raise what the processes have told each other where they were not about the same."""
        presences = operation.presences or []
        self._inside = False
        # Nobody would come to what is left.
        self._closed = any(presence.leaves for presence in presences)
        if self._closed:
            self._end_watch()
        raise PeerError if operation.failure else disagreement_error(presences, operation.rank)

    def _repair(self, operation: Operation, error: Exception) -> bool:
        """Have a communicator of those who are left, which they are in from their next attempt on. All of them come
        here, from this operation or from the one behind it.

        Returns:
          Whether others had completed the operation: then it is completed here, too.
        """
        noticed = time.perf_counter()
        self._make_sure()

        def level(comm: MPI.Comm) -> tuple[bool, tuple[str, float]]:
            counts = np.zeros(comm.size, np.int64)
            comm.Allgather(np.asarray([self._completed], np.int64), counts)
            most = counts.max()
            behind = bool(self._completed < most)
            if counts.min() < most:
                (operation if behind else self._last).hand_on(comm, int(counts.argmax()))
            return behind, comm.bcast((operation.about or "a collective", time.perf_counter() - noticed))

        comm, (behind, how) = repaired(self._mpi, self.comm, level)
        left = self._together.over(comm)
        if len(left.everyone) == self.processes:
            raise error  # nobody was lost
        self._left = left, how
        return behind

    def _make_sure(self) -> None:
        """Return if others are lost to this process, and not it to them; else it ends. Where it was stopped for so long
        that they gave it up, it must not go on alone.
        """
        if self._watch is not None:
            self._watch.caught_up()
        ending.confirm()

    def _go_on(self, left: ProcessGroup, how: tuple[str, float]) -> None:
        """From now on without those who are lost: the same operation on all processes.

        Raises:
          WorkerError: too few are left.
        """
        gone, self._left = self._together.gone(left), None
        self._take(left)
        self._lose(gone, how)

    def _take(self, together: ProcessGroup) -> None:
        """Be one of these."""
        self._together, self.comm = together, together.comm
        self._watch_over(together)
        self.rank, self.processes = self.comm.rank, self.comm.size
        self._frame.of(self.processes)
        self._piece_bytes = PIECE_BYTES if together.one_host else FLAT_PIECE_BYTES
        if self._ways is not None:
            self._ways.free()
        self._ways = multi_host_algorithms(self._mpi, together, survives=self.survives)
        self._on_devices.of(together)
        carried = {seat for process in together.everyone for seat in process.seats}
        self.unowned_slots = tuple(seat for seat in range(self.capacity) if seat not in carried)

    # --- threads and errors -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._check_open()
        if self._torn:
            raise WorkerError(
                f"rank {self.rank} has left a collective before its end, by an error, and the others are still in "
                "it: they cannot be reached any more."
            )
        if get_ident() not in self._threads:
            self._admit(current_thread().name)

    def _end_by(self, error: BaseException) -> None:
        if isinstance(error, self._mpi.Exception):
            raise WorkerError(
                f"rank {self.rank} of {self.processes}: MPI gave up ({error.Get_error_string()}). Most likely "
                "another rank has failed: its error says why."
            ) from error
        self._torn = self._inside

    def _admit(self, thread: str) -> None:
        """Take down that a thread uses this world, if MPI allows it to."""
        if self._mpi.Query_thread() < self._mpi.THREAD_MULTIPLE and not self._mpi.Is_thread_main():
            raise CollectiveError(
                f"MPI was initialised for one thread at a time, and thread {thread!r} uses {self!r}. Without an "
                "mpi4py.rc.thread_level of your own, mpi4py asks for MPI.THREAD_MULTIPLE."
            )
        self._threads[get_ident()] = thread

    def _warn_if_oversubscribed(self, host: MPI.Comm) -> None:
        allowed = host.allgather(None if chosen_threads() else allowed_cpus())
        started = launcher()
        advice = oversubscription([cpus for cpus in allowed if cpus is not None], started.name if started else "")
        advices = [text for text in self.comm.allgather(advice) if text]
        if advices and self.rank == 0:
            warn(advices[0], OversubscriptionWarning, stacklevel=3)


def _load(devices: Sequence[jax.Device] | None) -> ModuleType | Any:
    if "mpi4py.MPI" not in sys.modules:
        prepare()
        on_accelerators.prepare(devices)
        boards.prepare()
    try:
        if enabled():
            import mpi4py

            mpi4py.rc.finalize = False  # it would wait for ever for those who are gone: `launchers.ending` does it
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise no_mpi(error) from error
    return MPI


@contextmanager
def _as_worker_error() -> Iterator[None]:
    """Raise WorkerError for an error of MPI, where a world is made."""
    try:
        yield
    except Exception as error:
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is None or not isinstance(error, mpi.Exception):
            raise
        raise WorkerError(
            f"comm.world() could not be made: MPI gave up ({mpi.Exception.Get_error_string(error)}). Most likely "
            "another rank has ended before, or in, its own comm.world()."
        ) from error


def _abort(mpi: Any, status: int) -> None:
    """End the other processes, as far as MPI is to; this one ends by itself."""
    if not enabled():  # where Open MPI survives losses this ends no others, and mpirun now and then hangs behind it
        mpi.COMM_WORLD.Abort(status)


def _default_device(rank_on_host: int) -> jax.Device:
    devices = jax.local_devices()
    return devices[0] if devices[0].platform == "cpu" else devices[rank_on_host % len(devices)]
