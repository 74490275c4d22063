"""Large sums from device memory to device memory, with a CUDA-aware MPI.

Each process receives one slice of all processes' values, sums it, and sends the sum to all. It sends and receives as
many bytes as in an all-reduce. MPI only transfers bytes; XLA adds, on the devices. MPI's own `Allreduce` is not used,
because Open MPI copies such buffers to unpinned memory of the host, and adds there.

    parts      JAX arrays, packed into one array with a row for each process
    arriving   an array that only MPI writes; not returned, and not reused
    results    ordinary arrays, computed by XLA from these
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial, reduce
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.reductions import Reduction
from collectives.worlds.transport.operations import ReduceMessage
from collectives.worlds.transport.process_group import ProcessGroup

from . import cuda
from .algorithms import is_large
from .autotune import KEPT, Autotuner, AutotunerCache, TuningKey

GROUP_BYTES = 128 << 20  # size of a group of packed parts; sending it takes up to four times this memory
NAMES = "through the host", "from device to device"
HOST, DEVICES = range(2)

_LOCAL_RANKS = "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"
_AT_A_TIME = 1 << 30  # bytes of one message: MPI counts with 32 bits
_TAG = 7104
_MPICH_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA

PartsByNumber = Mapping[int, jax.Array]  # of one message, by their numbers


class DeviceAccess(NamedTuple):
    """Which device memory MPI can access for one process.

    Attributes:
      why_not: why MPI cannot access the memory of this process's device; "" if it can.
      device: the device's UUID.
      seen: UUIDs of the devices visible to this process. To map another process's memory, the driver must see its
        device; otherwise Open MPI ends the job.
    """

    why_not: str
    device: bytes = b""
    seen: tuple[bytes, ...] = (b"",)


class CudaAwareSums:
    """Large sums from device to device, and the choice between this route and the one through the host.

    Handles one message at a time.

    Attributes:
      results: the parts of the latest message that were summed from device to device, by number.
      always: the route of all messages, if both are possible; None selects the faster one by measuring. Replicated.
    """

    def __init__(self, mpi: Any, device: jax.Device):
        self._mpi, self._device, self._own = mpi, device, reach(mpi, device)
        self._why: str | None = None  # why all sums go through the host; "" if they need not; None if not known yet
        self._tuners = AutotunerCache(NAMES)
        self._fixed: set[Hashable] = set()  # channels of deterministic programs, whose messages go through the host
        self._channels: dict[Hashable, None] = {}  # channels on GPUs with large sums, the latest last
        self._held: list[tuple[Any, Any]] = []  # of failed operations: a request, and the memory it may write to
        self._timed: tuple[Autotuner, float] | None = None  # the message under way, and when it began
        # MPI's send and receive memory, if other processes cannot map JAX's.
        own = not self._own.why_not and cuda.is_nvidia(device) and not cuda.can_be_mapped(device)
        self._shareable = cuda.Shareable() if own else None
        self.results: PartsByNumber = {}
        self.always: int | None = None

    def set_group(self, group: ProcessGroup) -> None:
        """Use this process group from now on. The possible routes are agreed in its first message with large sums."""
        self._group, self._why = group, None
        self._tuners.clear()

    @property
    def through_host(self) -> bool:
        """Whether all messages go through the host; false while this is not known. Replicated."""
        return bool(self._why)

    def stays(self, parts: Sequence[Any], ops: Sequence[Reduction], channel: Hashable) -> list[int]:
        """Return the numbers of the parts that most likely need no copy to the host. Local."""
        tuner = self._tuners.latest(channel)
        route = tuner.choice if self.always is None and tuner is not None else self.always
        return [] if route == HOST or channel in self._fixed else self._candidates(parts, ops)

    def _candidates(self, parts: Sequence[Any], ops: Sequence[Reduction]) -> list[int]:
        """Return the numbers of the parts that may go from device to device: not part 0, which carries the status."""
        if self._why or self._own.why_not:
            return []
        return [j for j in range(1, len(parts)) if is_large(ops[j], parts[j].nbytes)]

    def begin_message(
        self,
        message: ReduceMessage,
        key: TuningKey,
        parts: Sequence[jax.Array],
        ops: Sequence[Reduction],
        *,
        large: bool,
        fixed: bool,
    ) -> None:
        """Let the large sums of a message go from device to device, if all processes can and it is faster.

        Args:
          large: whether the message has large sums other than part 0.
          fixed: send through the host, without measuring, because the bits of a sum depend on the route.
        """
        self.results, self._timed = {}, None
        if not large or self._group.comm.size == 1:
            return
        if self._device.platform != "cpu":
            self._remember(key[0])
        if self._why:
            return
        candidates = {j: parts[j] for j in self._candidates(parts, ops)}
        if candidates:
            cuda.make_current(self._device)
        message.wrap_reduce(partial(self._carry_out, message, key, candidates, fixed), agreed=False)

    def end_message(self) -> None:
        """Record the time of a message; called when all results are on the devices."""
        if self._timed is not None:
            tuner, began = self._timed
            tuner.record(perf_counter() - began)
        self.results, self._timed = {}, None

    def _remember(self, channel: Hashable) -> None:
        self._channels.pop(channel, None)
        self._channels[channel] = None
        if len(self._channels) > KEPT:
            del self._channels[next(iter(self._channels))]

    def _carry_out(
        self,
        message: ReduceMessage,
        key: TuningKey,
        parts: PartsByNumber,
        fixed: bool,
        others: Callable[[], np.ndarray],
    ) -> np.ndarray:
        # Replicated state changes only here, where all processes are known to be in the same message.
        comm = self._group.comm
        if self._why is None:
            self._why = agreed(comm.allgather(self._own), one_host=self._group.one_host)
        if self._why:
            return others()
        if self._route(comm, message.about, key, fixed) == DEVICES:
            message.agreed = True  # because results on devices cannot be handed on after a loss
            self.results = self._sum(comm, parts)
        return others()

    def _route(self, comm: Any, about: str, key: TuningKey, fixed: bool) -> int:
        """Return the route of this message. Replicated."""
        if self.always is not None:
            return self.always
        if fixed:
            self._fixed.add(key[0])
            return HOST
        tuner = self._tuners.get(key)
        self._tuners.keep(key, tuner)
        if (times := tuner.due) is not None:
            comm.Allreduce(self._mpi.IN_PLACE, times, self._mpi.MAX)
            tuner.compare(times, about)
        route = tuner.choice
        self._timed = tuner, perf_counter()
        return route

    def close(self) -> None:
        """Free what it holds, after the last message."""
        if self._shareable is not None and not self._held:
            self._shareable.free()

    def describe(self, channel: Hashable) -> str:
        """Describe the route of a channel's large sums; "" on CPUs, or if none was sent. Replicated."""
        if channel not in self._channels or self._why is None:
            return ""
        if self._why:
            return f"{NAMES[HOST]}: {self._why}"
        if self.always is not None:
            return NAMES[self.always]
        if channel in self._fixed:
            return f"{NAMES[HOST]}, not measured: in a deterministic program"
        return self._tuners.describe(channel)

    # --- the sums -----------------------------------------------------------------------------------------------------

    def _sum(self, comm: Any, parts: PartsByNumber) -> PartsByNumber:
        """Return the parts summed over all ranks, on the device; bitwise equal on all ranks and in every run."""
        self._held = [(request, memory) for request, memory in self._held if not _is_over(request)]
        if self._held and self._shareable is not None:
            self._shareable.leave()
        found: dict[int, jax.Array] = {}
        for numbers in groups({j: (x.nbytes, x.dtype) for j, x in parts.items()}):
            found.update(zip(numbers, self._sum_of_group(comm, [parts[j] for j in numbers]), strict=True))
        return found

    def _sum_of_group(self, comm: Any, parts: list[jax.Array]) -> list[jax.Array]:
        size, rank = comm.size, comm.rank
        rows = _pack(parts, size)
        # Two halves: a row for each rank's values of this rank's slice, and a row for each slice's sum.
        arriving = jnp.zeros((2, *rows.shape), rows.dtype, device=self._device)
        jax.block_until_ready((rows, arriving))
        whole, nbytes = rows.nbytes, rows.nbytes // size
        others = [other for other in range(size) if other != rank]
        shared = 0 if self._shareable is None else self._shareable.room(3 * whole)
        sent, room = (shared, shared + whole) if shared else (_address(rows), _address(arriving))

        self._copy(shared, sent, _address(rows), whole)
        to = [(other, sent + other * nbytes) for other in others]
        self._swap(comm, to, [(other, room + other * nbytes) for other in others], nbytes, (rows, arriving))
        self._copy(shared, _address(arriving), room, whole)

        own = jax.block_until_ready(_add_up(rows, arriving, rank))
        self._copy(shared, sent, _address(own), nbytes)
        to = [(other, sent if shared else _address(own)) for other in others]
        room += whole
        self._swap(comm, to, [(other, room + other * nbytes) for other in others], nbytes, (own, arriving))
        self._copy(shared, _address(arriving) + whole, room, whole)
        return jax.block_until_ready(_unpack(arriving, own, rank, tuple(x.shape for x in parts)))

    def _copy(self, shared: int, to: int, source: int, nbytes: int) -> None:
        """Copy between JAX's memory and the shareable memory, if MPI uses the latter."""
        if shared and self._shareable is not None:
            self._shareable.copy(to, source, nbytes)

    def _swap(
        self,
        comm: Any,
        sent: Sequence[tuple[int, int]],
        received: Sequence[tuple[int, int]],
        nbytes: int,
        memory: Any,
    ) -> None:
        """Exchange `nbytes` with other ranks: `sent` and `received` hold pairs of a rank and an address in `memory`."""
        under_way: list[Any] = []
        try:
            for other, address in received:
                under_way += [comm.Irecv(piece, other, _TAG) for piece in self._pieces(address, nbytes)]
            for other, address in sent:
                under_way += [comm.Isend(piece, other, _TAG) for piece in self._pieces(address, nbytes)]
            for request in under_way:
                request.Wait()
        except BaseException:
            self._held += [(request, memory) for request in under_way if request]
            raise

    def _pieces(self, address: int, nbytes: int) -> Iterator[Any]:
        for start in range(0, nbytes, _AT_A_TIME):
            yield self._mpi.buffer.fromaddress(address + start, min(_AT_A_TIME, nbytes - start))


def _is_over(request: Any) -> bool:
    """Return whether a request is complete, by an error or not."""
    with suppress(Exception):
        request.Test()
    return not request


def groups(parts: Mapping[int, tuple[int, np.dtype]]) -> list[list[int]]:
    """Return groups of parts to pack together: consecutive parts of one dtype, up to `GROUP_BYTES`, or one larger part.

    Args:
      parts: bytes and dtype of each part, by number.
    """
    found: list[list[int]] = []
    room, last = 0, None
    for j, (nbytes, dtype) in parts.items():
        if dtype != last or nbytes > room:
            found.append([])
            room, last = GROUP_BYTES, dtype
        found[-1].append(j)
        room -= nbytes
    return found


def _address(x: jax.Array) -> int:
    return int(x.unsafe_buffer_pointer())


@partial(jax.jit, static_argnums=1)
def _pack(parts: list[jax.Array], size: int) -> jax.Array:
    """Pack all elements of the parts into one row per rank, padded; shape=(size, elements per rank)."""
    flat = jnp.concatenate([x.reshape(-1) for x in parts])
    return jnp.pad(flat, (0, -flat.size % size)).reshape(size, -1)


@partial(jax.jit, static_argnums=2)
def _add_up(rows: jax.Array, arriving: jax.Array, rank: int) -> jax.Array:
    """Return this rank's slice of the sum, added in the order of the ranks."""
    addends = [rows[rank] if other == rank else arriving[0, other] for other in range(len(rows))]
    return reduce(jnp.add, addends)


@partial(jax.jit, static_argnums=(2, 3))
def _unpack(arriving: jax.Array, own: jax.Array, rank: int, shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
    """Return the parts, reassembled from all ranks' slices."""
    flat = arriving[1].at[rank].set(own).reshape(-1)
    sizes = [int(np.prod(shape)) for shape in shapes]
    ends = np.cumsum(sizes)
    return [flat[end - n : end].reshape(shape) for n, end, shape in zip(sizes, ends, shapes, strict=True)]


# --- what MPI reaches -------------------------------------------------------------------------------------------------


def agreed(everyone: Sequence[DeviceAccess], *, one_host: bool) -> str:
    """Return why large sums go through the host, or "" if they need not.

    Args:
      everyone: the memory access of each process, by rank.
      one_host: whether all processes are on one host. Between hosts sums go through the host, because the faster route
        depends on the network, which MPI does not report.
    """
    for rank, own in enumerate(everyone):
        if own.why_not:
            return own.why_not if len({r.why_not for r in everyone}) == 1 else f"on rank {rank} {own.why_not}"
    if not one_host:
        return "processes are on several hosts"
    for rank, own in enumerate(everyone):
        for other, its in enumerate(everyone):
            if its.device not in own.seen:
                return f"rank {rank} does not see the GPU of rank {other}, which MPI needs"
    return ""


def reach(mpi: Any, device: jax.Device) -> DeviceAccess:
    """Return the device memory that MPI can access for this process. Local."""
    why = why_not(mpi, device)
    if why:
        return DeviceAccess(why)
    cuda.make_current(device)
    return DeviceAccess("", *cuda.seen(cuda.number(device)))


def why_not(mpi: Any, device: jax.Device) -> str:
    """Return why MPI cannot access the memory of a device; "" if it can."""
    if device.platform == "cpu":
        return "there is no accelerator"
    if not cuda.is_nvidia(device):
        return "the devices are not NVIDIA GPUs"
    return "" if says_cuda(mpi) else "MPI is not CUDA-aware"


def says_cuda(mpi: Any) -> bool:
    """Return whether MPI reports that it accepts CUDA memory: it is built with support, which is enabled."""
    library = ctypes.CDLL(mpi.__file__)  # finds the symbols of the MPI library that mpi4py has loaded
    if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI, and MPICH
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):  # others that come from MPICH
        answer = ctypes.c_int(0)
        return library.MPIX_GPU_query_support(_MPICH_CUDA, ctypes.byref(answer)) == 0 and bool(answer.value)
    return False


def prepare_context(devices: Sequence[jax.Device] | None = None, environ: Mapping[str, str] = os.environ) -> None:
    """Make the context of this process's GPU current in this thread, before MPI is loaded. Without a context at start,
    Open MPI never maps the memory of other processes' GPUs, but copies it in pieces through the host.

    Args:
      devices: the devices of this process; by default the device with the number of this process on its host.
      environ: the environment variables of the launcher.
    """
    found = jax.local_devices() if devices is None else devices
    local = next((int(environ[name]) for name in _LOCAL_RANKS if environ.get(name, "").isdigit()), 0)
    device = found[local % len(found)] if devices is None else found[0]
    if cuda.is_nvidia(device):
        cuda.make_current(device)
