"""Workers as MPI processes. All of MPI is in this file."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock, current_thread, get_ident
from types import ModuleType
from typing import TYPE_CHECKING, Any
from warnings import warn
from zlib import crc32

import jax
import numpy as np

from adaptive import CollectiveError, WorkerError
from adaptive.extend import (
    FAILURE_THREAD,
    Arrived,
    Arriving,
    LookAtPiece,
    Parts,
    Starting,
    WhenWaitedFor,
    allowed_cpus,
    chosen_threads,
    current_line,
    launcher,
    phase,
)

from .devices import DeviceWorld, check_devices
from .frame import Frame
from .launch import check_agreement, no_mpi
from .meeting import Presence, why_not
from .patience import SECONDS, checked, introduce, watch
from .scope import Scope, describe
from .threads import OversubscriptionWarning, oversubscription

if TYPE_CHECKING:
    from mpi4py import MPI

# An Allreduce takes this much at a time where all ranks are on one host: pieces stay in the caches between the copy
# from the other rank, the sum and the copy back. ResNet-50's gradients between two ranks (medians, in ms): 23 in pieces
# of 64 kB, 18 of 128, 16.5 of 256, 15.4 of 512, 16.5 of 1024, 17.7 of 4096, 20 as whole tensors; with two to four in
# flight as Iallreduce, 1.2 to 1.3 times as long (benchmarks/exchange_resnet50.py). Across hosts whole parts are taken,
# since there every piece would pay the network's latency; no more than 32-bit counts hold.
PIECE_BYTES = 512 << 10
PIECE_BYTES_ACROSS_HOSTS = 1 << 30

ALIGNMENT = 64  # bytes; XLA on CPU takes buffers so aligned as they are, and copies others
KEPT_LAYOUTS = 64  # a program has one or a few; eager calls may have any number

_SHARE, _BARRIER, _CLOSE, _FAILURE = (crc32(kind) for kind in (b"share", b"barrier", b"close", b"failure"))
_making = Lock()  # duplicating a communicator is a collective on it, which two threads must not do at once

Layout = tuple[tuple[tuple[int, ...], np.dtype, str], ...]  # shape, dtype and op of each part


class MPIWorld(Starting, Scope):
    """One worker per MPI rank, or one per local device: then a sum over the process's devices comes first.

    Args:
      comm: an mpi4py communicator, of which this world uses a duplicate; COMM_WORLD by default.
      devices: this process's, one worker on each; need not be equally many on all ranks. By default one: JAX's first
        CPU, or, where there are several accelerators, the one that belongs to this rank among those of its host.
      patience: seconds for which a rank may keep the others waiting before it is taken for stuck, 0 for ever; the same
        on all ranks (`patience.py`).

    All that processes do together begins with a frame (`frame.py`), so that ranks which are in different collectives
    are told. Threads may share a world, one of them is in a collective at a time; programs that run in threads of their
    own need a world each, since which of them comes first is not the same on all ranks.

    Raises:
      LaunchError: MPI cannot be loaded, or is not that of the launcher.
      CollectiveError: `patience` is no number of seconds.
      DisagreementError: it is not the same on all ranks. On every rank.
    """

    def __init__(
        self,
        comm: MPI.Comm | None = None,
        devices: Sequence[jax.Device] | None = None,
        patience: float = SECONDS,
    ):
        super().__init__()
        patience = checked(patience)
        self._mpi = mpi = _load()
        if comm is None:
            check_agreement(mpi.COMM_WORLD.size, mpi.Get_library_version())
        # The one communicator of this world. What remains of it after a lost rank could stand here instead.
        with _making:
            self.comm: MPI.Comm = (mpi.COMM_WORLD if comm is None else comm).Dup()
        self.comm.Set_errhandler(mpi.ERRORS_RETURN)  # errors become exceptions, whatever the user's communicator does
        self.rank: int = self.comm.rank
        self.processes: int = self.comm.size

        host = self.comm.Split_type(mpi.COMM_TYPE_SHARED)
        self.devices: Sequence[jax.Device] = (_default_device(host.rank),) if devices is None else tuple(devices)
        check_devices(self.devices)
        self._piece_bytes = PIECE_BYTES if host.size == self.processes else PIECE_BYTES_ACROSS_HOSTS
        if self.devices[0].platform == "cpu":
            self._warn_if_oversubscribed(host)
        peer, datagrams = introduce(self.rank, host.bcast(self.rank), patience)
        host.Free()

        counts = self.comm.allgather(len(self.devices))
        first = sum(counts[: self.rank])
        self.size: int = sum(counts)
        self.workers = range(first, first + len(self.devices))
        self._local = DeviceWorld(self.devices)
        self._ops = {"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN}
        self._inboxes: dict[tuple[Layout, int, Hashable], Iterator[_Inbox]] = {}
        self._latest: tuple[Any, Iterator[_Inbox]] = None, iter(())  # of the inboxes, used last
        self._frame = Frame(self.processes)
        self._lock = Lock()
        self._threads: dict[int, str] = {}  # that have used this world
        self._inside = False  # a collective that other processes are in too
        self._torn = False  # one that this process has left, and others have not
        self._operation = ("", False)  # for the watch: a new one each time
        self._survives = False  # the loss of ranks
        self._watch = watch(self, self.comm.allgather(peer), self.rank, datagrams, self._abort)

    def start(
        self,
        parts: Sequence[Parts],
        ops: Sequence[str],
        status: np.ndarray,
        channel: Hashable = 0,
        about: str = "",
        more: str = "",
        look: LookAtPiece | None = None,
    ) -> Arriving:
        """Begin to reduce over this process's workers, and to copy from accelerators: the protocol of `World`.

        Nothing is sent before it is waited for: Allreduce blocks, and several in flight took longer (see above).
        """
        local = None if len(self.devices) == 1 else self._local.start(parts, ops, status)
        if local is None and self.devices[0].platform != "cpu":
            for x in parts[0]:
                x.copy_to_host_async()
        return WhenWaitedFor(partial(self._wait_for, local, parts[0], ops, status, channel, about, more, look))

    def _wait_for(
        self,
        local: Arriving | None,
        row: Parts,
        ops: Sequence[str],
        status: np.ndarray,
        channel: Hashable,
        about: str,
        more: str,
        look: LookAtPiece | None,
    ) -> Arrived:
        """Over ranks what is reduced over this process's workers, or the parts of its only one."""
        on_cpu = self.devices[0].platform == "cpu"
        if local is not None:
            row = local.wait()[0][0]
            if not on_cpu:
                for x in row:
                    x.copy_to_host_async()
        # np.asarray is free of copies on CPU. Part 0 is copied all the same: the status goes into it.
        sent: Sequence[Any] = [np.asarray(x) for x in row] if on_cpu else row
        layout = tuple((x.shape, x.dtype, op) for x, op in zip(row, ops, strict=True))
        with self._collective():
            inbox = self._inbox(layout, len(status), channel)
            first, travelling, free = inbox.buffers[0], inbox.travelling, inbox.free
            travelling[:] = np.asarray(sent[0])
            free[:] = status
            self._meet(about, more, inbox.name, inbox.text)
            if travelling is first:
                self._reduce(None, first, ops[0], 0, look)
            else:
                _round(travelling, first)
            for j in range(1, len(sent)):
                self._reduce(np.asarray(sent[j]), inbox.buffers[j], ops[j], j, look)
            arrived = free.astype(first.dtype)
        return inbox.arrays(self.devices), arrived

    def all_gather_bytes(self, value: bytes, about: str = "", more: str = "") -> list[bytes]:
        """Every process's `value`, by rank."""
        with self._collective():
            self._meet(about, more, _SHARE, "values to share")
            return self.comm.allgather(value)

    def barrier(self) -> None:
        """Return once every process has called it."""
        with self._collective():
            self._meet("a barrier", "", _BARRIER)

    def fail(self, why: str) -> None:
        """Make all other processes raise WorkerError, in whatever they do together now or next."""
        with suppress(_HeardError), self._collective():
            self._meet("", "", _FAILURE, failure=why)

    def close(self) -> None:
        """Free the communicator. All processes do so, at the end of their `with` blocks.

        Raises:
          DisagreementError: others are not at the end, but in a step, say. On every process.
        """
        if self._closed:
            return
        try:
            with self._collective():
                self._meet("the end of its world's block", self._parting, _CLOSE)
                self.comm.Free()
        finally:
            self._inboxes.clear()
            self._latest = None, iter(())
            super().close()
            self._end_watch()

    def _abandon(self, why: str) -> None:
        super()._abandon(why)
        self._end_watch(why)

    @staticmethod
    def _abort(status: int) -> None:
        """End all processes of the job, as far as MPI can: the one that calls it ends by itself."""
        if os.environ.get("OMPI_MCA_mpi_ft_enable", "0") == "0":
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(status)
        # Where Open MPI survives losses its Abort ends no others, and now and then hangs mpirun.

    def _end_watch(self, why: str = "") -> None:
        if self._watch is not None:
            self._watch.close(why)

    def __repr__(self) -> str:
        s = "s" * (self.size > 1)
        own = f"worker {self.workers[0]}" if len(self.workers) == 1 else f"workers {self.workers[0]}–{self.workers[-1]}"
        return (
            f"MPIWorld({self.size} worker{s}; rank {self.rank} of {self.processes}: {own} on {describe(self.devices)})"
        )

    @phase("in a collective", exchanges=True)
    def _reduce(
        self, sent: np.ndarray | None, received: np.ndarray, op: str, part: int = 0, look: LookAtPiece | None = None
    ) -> None:
        """Allreduce `sent`, or `received` in place where there is none, piece by piece; and have each looked at."""
        flat = received.reshape(-1)
        if op != "sum" and flat.dtype.kind == "f":
            # As integers: MPI's extremes of floats drop NaNs or not, as the ranks happen to be paired.
            keys = _keys(flat if sent is None else sent.reshape(-1), op)
            self._reduce(None, keys, op)
            flat[:] = _from_keys(keys, flat.dtype)
            return
        mpi_op = self._ops[op]
        source = None if sent is None else sent.reshape(-1)
        step = self._piece_bytes // flat.itemsize
        for start in range(0, flat.size, step):
            piece = slice(start, start + step)
            self.comm.Allreduce(self._mpi.IN_PLACE if source is None else source[piece], flat[piece], mpi_op)
            if look is not None:
                look(part, start, flat[piece])

    def _inbox(self, layout: Layout, status: int, channel: Hashable) -> _Inbox:
        """The buffers for this call: of two sets per layout and channel, in turn, so results stay valid until the
        second-next.
        """
        key = (layout, status, channel)
        if key == self._latest[0]:  # compared sooner than hashed
            return next(self._latest[1])
        turns = self._inboxes.pop(key, None)
        if turns is None:
            check_dtypes(layout)
            turns = itertools.cycle([_Inbox(layout, status, self._frame.room) for _ in range(2)])
            if len(self._inboxes) == KEPT_LAYOUTS:
                del self._inboxes[
                    next(iter(self._inboxes))
                ]  # the one not used for longest; arrays keep its memory alive
        self._inboxes[key] = turns
        self._latest = key, turns
        return next(turns)

    def _collective(self) -> _Together:
        """Around all that processes do together: one thread at a time, and MPI's errors as ours."""
        return _Together(self)

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

    @phase("in a collective", exchanges=True)
    def _meet(self, about: str, more: str, kind: int, text: str = "", failure: str = "") -> None:
        """The frame: raise, on all processes, unless all are about the same, in a collective of one kind.

        Args:
          kind: a number of all else that must be equal, and `text` the words for it.
          failure: this process is in no collective, but has failed.
        """
        self._frame.announce(crc32(about.encode(), kind))
        self._operation = about, kind == _CLOSE
        self._inside = True
        self.comm.Allreduce(self._mpi.IN_PLACE, self._frame.numbers)
        if not self._frame.is_of_one_mind():
            names = [name for name in self._threads.values() if name != FAILURE_THREAD]
            leaves = self._leaving or kind == _CLOSE
            everyone = self.comm.allgather(Presence(about, text, more, current_line(), failure, leaves, names))
            self._inside = False
            self._closed = any(presence.leaves for presence in everyone)  # nobody would come to what is left
            if self._closed:
                self._end_watch()
            raise _HeardError if failure else why_not(everyone, self.rank)

    def _warn_if_oversubscribed(self, host: MPI.Comm) -> None:
        allowed = host.allgather(None if chosen_threads() else allowed_cpus())
        started = launcher()
        advice = oversubscription([cpus for cpus in allowed if cpus is not None], started.name if started else "")
        advices = [text for text in self.comm.allgather(advice) if text]
        if advices and self.rank == 0:
            warn(advices[0], OversubscriptionWarning, stacklevel=3)


class _Together:
    """A `with` block of `MPIWorld._collective`; a class of its own, since every message is in one."""

    def __init__(self, world: MPIWorld):
        self._world = world

    def __enter__(self) -> None:
        self._world._lock.acquire()
        try:
            self._world._begin()
        except BaseException:
            self._world._lock.release()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        world = self._world
        try:
            if error is not None:
                world._end_by(error)
        finally:
            world._inside = False
            world._lock.release()


class _HeardError(Exception):
    """The other processes know that this one has failed."""


class _Inbox:
    """Where a message arrives: one buffer per part, and JAX arrays that are these buffers.

    Attributes:
      text: what the message is made of.
      name: a number for it.
      travelling: where part 0 is reduced: in the frame, in double precision, if there is room for it.
      free: the part of it that is for the status.
    """

    def __init__(self, layout: Layout, status: int, room: np.ndarray):
        self.text = f"{', '.join(f'{op} {dtype}{list(shape)}' for shape, dtype, op in layout)}; status {status}"
        self.name = crc32(self.text.encode())
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype, _ in layout]
        starts = [0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        # One piece of memory for all: numpy asks for huge pages from 4 MB on, and ranks read each other's memory faster
        # by them (ResNet-50's gradients, whole tensors: 21 ms; 28 with memory of its own for each).
        memory = np.empty(starts[-1] + ALIGNMENT, np.uint8)
        offset = -memory.ctypes.data % ALIGNMENT
        self.buffers = [
            memory[offset + start : offset + start + size].view(dtype).reshape(shape)
            for start, size, (shape, dtype, _) in zip(starts, sizes, layout, strict=False)
        ]
        first = self.buffers[0]
        self.travelling = first if len(first) > len(room) else room[: len(first)]
        self.free = self.travelling[len(first) - status :]
        self._aliases: list[jax.Array | None] = [None] * len(layout)
        self._default = jax.local_devices(backend="cpu")[0]

    def arrays(self, devices: Sequence[jax.Device]) -> list[list[jax.Array]]:
        """The buffers' contents on each device."""
        if devices[0] == self._default and len(devices) == 1:
            return [[self._alias(j) for j in range(len(self.buffers))]]
        rows = [
            [self._alias(j) for j in range(len(self.buffers))]
            if device == self._default
            else jax.device_put(self.buffers, [device] * len(self.buffers))
            for device in devices
        ]
        return jax.block_until_ready(rows)

    def _alias(self, j: int) -> jax.Array:
        """Part j on JAX's default CPU: no copy, and made once, since it stays the same memory."""
        alias = self._aliases[j]
        if alias is None or alias.is_deleted():
            self._aliases[j] = alias = jax.dlpack.from_dlpack(self.buffers[j])
        return alias


def _load() -> ModuleType | Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise no_mpi(error) from error
    return MPI


def _default_device(rank_on_host: int) -> jax.Device:
    devices = jax.local_devices()
    return devices[0] if devices[0].platform == "cpu" else devices[rank_on_host % len(devices)]


def check_dtypes(layout: Layout) -> None:
    """Raise unless MPI can reduce all parts."""
    for j, (_, dtype, _) in enumerate(layout):
        if dtype.kind not in "iufc" or dtype == np.float16:
            raise CollectiveError(
                f"part {j} of a message is {dtype}, which MPI cannot reduce. Send a type of C: half precisions as "
                "float32, booleans as uint8."
            )


def _round(wide: np.ndarray, received: np.ndarray) -> None:
    """A sum in double precision, to that of the part; beyond its range it is infinite."""
    with np.errstate(over="ignore"):
        received[:] = wide


def _keys(x: np.ndarray, op: str) -> np.ndarray:
    """Integers in the order of floats; NaN comes first for "min" and last for "max", so that it is kept."""
    x = np.where(np.isnan(x), np.copysign(np.array(np.nan, x.dtype), 1 if op == "max" else -1), x)
    return _flip(x.view(f"i{x.itemsize}"))


def _from_keys(keys: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return _flip(keys).view(dtype)


def _flip(bits: np.ndarray) -> np.ndarray:
    """From sign and magnitude (floats) to two's complement (integers), and back: it is its own inverse."""
    return np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)
