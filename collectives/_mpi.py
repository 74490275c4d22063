"""Workers as MPI processes. All of MPI is in this file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any
from warnings import warn

import jax
import numpy as np

from adaptive._cores import allowed_cpus, chosen_threads
from adaptive._errors import CollectiveError, DisagreementError, WorkerError
from adaptive._world import Parts

from ._devices import DeviceWorld, check_devices
from ._launcher import check_agreement, launcher, no_mpi
from ._scope import Scope, describe
from ._threads import OversubscriptionWarning, oversubscription

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

Layout = tuple[tuple[tuple[int, ...], np.dtype, str], ...]  # shape, dtype and op of each part


class MPIWorld(Scope):
    """One worker per MPI rank, or one per local device: then a sum over the process's devices comes first.

    Args:
      comm: an mpi4py communicator, of which this world uses a duplicate; COMM_WORLD by default.
      devices: this process's, one worker on each; need not be equally many on all ranks. By default one: JAX's first
        CPU, or, where there are several accelerators, the one that belongs to this rank among those of its host.

    Raises:
      LaunchError: MPI cannot be loaded, or is not that of the launcher.
    """

    def __init__(self, comm: MPI.Comm | None = None, devices: Sequence[jax.Device] | None = None):
        super().__init__()
        self._mpi = mpi = _load()
        if comm is None:
            check_agreement(mpi.COMM_WORLD.size, mpi.Get_library_version())
        # The one communicator of this world. What remains of it after a lost rank could stand here instead.
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
        host.Free()

        counts = self.comm.allgather(len(self.devices))
        first = sum(counts[: self.rank])
        self.size: int = sum(counts)
        self.workers = range(first, first + len(self.devices))
        self._local = DeviceWorld(self.devices)
        self._ops = {"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN}
        self._inboxes: dict[tuple[Layout, int, int], Iterator[_Inbox]] = {}

    def exchange(
        self, parts: Sequence[Parts], ops: Sequence[str], tail: np.ndarray, channel: int = 0
    ) -> tuple[list[list[jax.Array]], np.ndarray]:
        """Reduce over this process's workers first, then over ranks: the protocol of `World`."""
        self._check_open()
        row = parts[0] if len(self.devices) == 1 else self._local.exchange(parts, ops, tail)[0][0]
        inbox = self._inbox(tuple((x.shape, x.dtype, op) for x, op in zip(row, ops, strict=True)), len(tail), channel)
        for x in row if self.devices[0].platform != "cpu" else ():
            x.copy_to_host_async()
        first = inbox.buffers[0]
        with self._mpi_errors():
            # np.asarray is free of copies on CPU. Part 0 is copied all the same: the tail goes into it.
            np.copyto(first, np.asarray(row[0]))
            first[len(first) - len(tail) :] = tail
            self._reduce(None, first, ops[0])
            for x, buffer, op in zip(row[1:], inbox.buffers[1:], ops[1:], strict=True):
                self._reduce(np.asarray(x), buffer, op)
        return inbox.arrays(self.devices), first[len(first) - len(tail) :].copy()

    def share(self, value: bytes) -> list[bytes]:
        """Every process's `value`, by rank."""
        self._check_open()
        with self._mpi_errors():
            return self.comm.allgather(value)

    def barrier(self) -> None:
        """Return once every process has called it."""
        self._check_open()
        with self._mpi_errors():
            self.comm.Barrier()

    def close(self) -> None:
        """Free the communicator. All processes do so, at the end of their `with` blocks."""
        if not self._closed:
            self.comm.Free()
            self._inboxes.clear()
        super().close()

    def __repr__(self) -> str:
        s = "s" * (self.size > 1)
        own = f"worker {self.workers[0]}" if len(self.workers) == 1 else f"workers {self.workers[0]}–{self.workers[-1]}"
        return (
            f"MPIWorld({self.size} worker{s}; rank {self.rank} of {self.processes}: {own} on {describe(self.devices)})"
        )

    def _reduce(self, sent: np.ndarray | None, received: np.ndarray, op: str) -> None:
        """Allreduce `sent`, or `received` in place where there is none, piece by piece."""
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

    def _inbox(self, layout: Layout, tail: int, channel: int) -> _Inbox:
        """The buffers for this call: of two sets per layout and channel, in turn, so results stay valid until the
        second-next.
        """
        key = (layout, tail, channel)
        turns = self._inboxes.pop(key, None)
        if turns is None:
            self._check_layout(layout, tail)
            turns = itertools.cycle((_Inbox(layout), _Inbox(layout)))
            if len(self._inboxes) == KEPT_LAYOUTS:
                del self._inboxes[
                    next(iter(self._inboxes))
                ]  # the one not used for longest; arrays keep its memory alive
        self._inboxes[key] = turns
        return next(turns)

    def _check_layout(self, layout: Layout, tail: int) -> None:
        """A new layout is new to all ranks: the time to see that they mean the same, at no cost to later calls."""
        for j, (_, dtype, _) in enumerate(layout):
            if dtype.kind not in "iufc" or dtype == np.float16:
                raise CollectiveError(
                    f"part {j} of a message is {dtype}, which MPI cannot reduce. Send a type of C: half precisions as "
                    "float32, booleans as uint8."
                )
        own = f"{', '.join(f'{op} {dtype}{list(shape)}' for shape, dtype, op in layout)}; tail {tail}"
        for rank, theirs in enumerate(self.share(own.encode())):
            if theirs != own.encode():
                raise DisagreementError(
                    f"ranks {rank} and {self.rank} exchange different messages:\n"
                    f"    on rank {rank}: {_shorten(theirs.decode())}\n"
                    f"    on rank {self.rank}: {_shorten(own)}\n"
                    "All workers must run the same driver, on values of the same shapes."
                )

    @contextmanager
    def _mpi_errors(self) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as error:
            raise WorkerError(
                f"rank {self.rank} of {self.processes}: MPI gave up ({error.Get_error_string()}). Most likely another "
                "rank has failed: its error says why."
            ) from error

    def _warn_if_oversubscribed(self, host: MPI.Comm) -> None:
        allowed = host.allgather(None if chosen_threads() else allowed_cpus())
        started = launcher()
        advice = oversubscription([cpus for cpus in allowed if cpus is not None], started.name if started else "")
        advices = [text for text in self.comm.allgather(advice) if text]
        if advices and self.rank == 0:
            warn(advices[0], OversubscriptionWarning, stacklevel=3)


class _Inbox:
    """Where a message arrives: one buffer per part, and JAX arrays that are these buffers."""

    def __init__(self, layout: Layout):
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
        self._aliases: list[jax.Array | None] = [None] * len(layout)

    def arrays(self, devices: Sequence[jax.Device]) -> list[list[jax.Array]]:
        """The buffers' contents on each device."""
        on_default = devices[0] == jax.local_devices(backend="cpu")[0]
        rows = [
            [
                self._alias(j) if on_default else jax.device_put(self.buffers[j], devices[0])
                for j in range(len(self.buffers))
            ]
        ]
        rows += [jax.device_put(self.buffers, [device] * len(self.buffers)) for device in devices[1:]]
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


def _keys(x: np.ndarray, op: str) -> np.ndarray:
    """Integers in the order of floats; NaN comes first for "min" and last for "max", so that it is kept."""
    x = np.where(np.isnan(x), np.copysign(np.array(np.nan, x.dtype), 1 if op == "max" else -1), x)
    return _flip(x.view(f"i{x.itemsize}"))


def _from_keys(keys: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return _flip(keys).view(dtype)


def _flip(bits: np.ndarray) -> np.ndarray:
    """From sign and magnitude (floats) to two's complement (integers), and back: it is its own inverse."""
    return np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)


def _shorten(text: str, limit: int = 400) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"
