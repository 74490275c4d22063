"""Large sums from the memory of devices to the memory of devices, where MPI reads and writes that: CUDA-aware MPI.

Each process adds up one slice of what all have, and then gives it to all, so it sends and receives as many bytes as in
an all-reduce. MPI only carries bytes; what is added up is added up by XLA, on the devices. An `Allreduce` of MPI's own
would not do: Open MPI copies such buffers to the host, to memory that is not even pinned, and adds up there.

    parts      JAX's; packed into one array, a row for each process
    arriving   where MPI writes, and nobody else: not handed out, and not used again
    results    arrays that XLA has made out of these, like any others, so whoever gets them may do with them as he likes
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

from adaptive.extend import Reduction
from collectives.worlds.transport.operations import ReduceMessage
from collectives.worlds.transport.process_group import ProcessGroup

from . import cuda
from .algorithms import is_large
from .autotune import KEPT, Autotuner, AutotunerCache, TuningKey

GROUP_BYTES = 128 << 20  # of parts that are packed together. Up to four times that is taken for as long as they travel
NAMES = "through the host", "from device to device"
HOST, DEVICES = range(2)

_LOCAL_RANKS = "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"
_AT_A_TIME = 1 << 30  # bytes of one message: MPI counts with 32 bits
_TAG = 7104
_MPICH_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA

PartsByNumber = Mapping[int, jax.Array]  # of one message, by their numbers


class DeviceAccess(NamedTuple):
    """Which memory MPI reaches for one process.

    Attributes:
      why_not: why it does not reach that of this process's device, in words; "" where it does.
      device: which one that is: for processes on one host.
      seen: all that this process sees. MPI maps another process's memory into this one, for which the driver has to
        know the device; Open MPI ends the job where it does not.
    """

    why_not: str
    device: bytes = b""
    seen: tuple[bytes, ...] = (b"",)


class CudaAwareSums:
    """Whether large sums go from device to device, and how. One message at a time.

    Attributes:
      results: of the message that was begun last, the parts that have gone so.
      always: the one way that messages take where there are both; `None`: the one that is measured to be faster.
        Replicated.
    """

    def __init__(self, mpi: Any, device: jax.Device):
        self._mpi, self._device, self._own = mpi, device, reach(mpi, device)
        self._why: str | None = None  # all go through the host; "" if they need not, `None` if that is not known yet
        self._choices = AutotunerCache(NAMES)
        self._fixed: set[Hashable] = set()  # channels whose messages go through the host, whatever is faster
        self._channels: dict[Hashable, None] = {}  # of GPUs, whose messages have large sums, the latest last
        self._held: list[tuple[Any, Any]] = []  # of operations that have failed: a request, and what it may write into
        self._timed: tuple[Autotuner, float] | None = None  # the message under way, and when it began
        # Where MPI writes, and reads, if other processes cannot map what JAX has.
        own = not self._own.why_not and cuda.is_nvidia(device) and not cuda.can_be_mapped(device)
        self._shareable = cuda.Shareable() if own else None
        self.results: PartsByNumber = {}
        self.always: int | None = None

    def of(self, together: ProcessGroup) -> None:
        """Of these processes from now on. They agree on it in the first message that has large sums."""
        self._together, self._why = together, None
        self._choices.forget()

    @property
    def through_host(self) -> bool:
        """Whether it is known that all go through the host. Replicated."""
        return bool(self._why)

    def stays(self, parts: Sequence[Any], ops: Sequence[Reduction], channel: Hashable) -> list[int]:
        """Which parts most likely do not go through the host, so that no copies of them are begun. Local."""
        choice = self._choices.latest(channel)
        way = choice.way if self.always is None and choice is not None else self.always
        return [] if way == HOST or channel in self._fixed else self._candidates(parts, ops)

    def _candidates(self, parts: Sequence[Any], ops: Sequence[Reduction]) -> list[int]:
        """Which parts may go from device to device. Part 0 does not: the status rides in it."""
        if self._why or self._own.why_not:
            return []
        return [j for j in range(1, len(parts)) if is_large(ops[j], parts[j].nbytes)]

    def begin(
        self,
        message: ReduceMessage,
        key: TuningKey,
        parts: Sequence[jax.Array],
        ops: Sequence[Reduction],
        *,
        large: bool,
        fixed: bool,
    ) -> None:
        """Have large sums of a message go from device to device, if all processes can and it is faster.

        Args:
          large: whether it has such, but for part 0.
          fixed: they go through the host, whatever is faster: the bits of a sum depend on the way.
        """
        self.results, self._timed = {}, None
        if not large or self._together.comm.size == 1:
            return
        if self._device.platform != "cpu":
            self._remember(key[0])
        if self._why:
            return
        candidates = {j: parts[j] for j in self._candidates(parts, ops)}
        if candidates:
            cuda.make_current(self._device)
        message.surround(partial(self._carry_out, message, key, candidates, fixed), agreed=False)

    def end(self) -> None:
        """Behind each message, when all of it is on the devices."""
        if self._timed is not None:
            choice, began = self._timed
            choice.took(perf_counter() - began)
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
        # Only here all are known to be about the same message, and what all know alike may change.
        comm = self._together.comm
        if self._why is None:
            self._why = agreed(comm.allgather(self._own), one_host=self._together.one_host)
        if self._why:
            return others()
        if self._way(comm, message.about, key, fixed) == DEVICES:
            message.agreed = True  # what lies on devices is not handed on
            self.results = self._sum(comm, parts)
        return others()

    def _way(self, comm: Any, about: str, key: TuningKey, fixed: bool) -> int:
        """Which way this message takes. Replicated."""
        if self.always is not None:
            return self.always
        if fixed:
            self._fixed.add(key[0])
            return HOST
        choice = self._choices.of(key)
        self._choices.keep(key, choice)
        if (times := choice.due) is not None:
            comm.Allreduce(self._mpi.IN_PLACE, times, self._mpi.MAX)
            choice.compare(times, about)
        way = choice.way
        self._timed = choice, perf_counter()
        return way

    def close(self) -> None:
        """Behind the last message."""
        if self._shareable is not None and not self._held:
            self._shareable.free()

    def in_words(self, channel: Hashable) -> str:
        """How a channel's large sums go, in words; nothing on CPUs, or where none was sent. Replicated."""
        if channel not in self._channels or self._why is None:
            return ""
        if self._why:
            return f"{NAMES[HOST]}: {self._why}"
        if self.always is not None:
            return NAMES[self.always]
        if channel in self._fixed:
            return f"{NAMES[HOST]}, whatever is faster: in a deterministic program"
        return self._choices.in_words(channel)

    # --- the sums -----------------------------------------------------------------------------------------------------

    def _sum(self, comm: Any, parts: PartsByNumber) -> PartsByNumber:
        """Parts, summed over all ranks, on the device: bitwise the same on all, and in every run."""
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
        # Two rooms: one row for what each rank has of this one's slice, and one row for each slice's sum.
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
        """Between JAX's memory and what is shared, where that is another one."""
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
        """Send to ranks what lies at addresses, and receive from ranks at others: `nbytes` each, within `memory`."""
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
    """Whether MPI is done with what it was given, by an error or not."""
    with suppress(Exception):
        request.Test()
    return not request


def groups(parts: Mapping[int, tuple[int, np.dtype]]) -> list[list[int]]:
    """Parts that are packed together: neighbors of one type, as many as go into `GROUP_BYTES`; of larger ones one.

    Args:
      parts: bytes and type of each.
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
    """All elements, in a row for each rank, the last of them filled up."""
    flat = jnp.concatenate([x.reshape(-1) for x in parts])
    return jnp.pad(flat, (0, -flat.size % size)).reshape(size, -1)


@partial(jax.jit, static_argnums=2)
def _add_up(rows: jax.Array, arriving: jax.Array, rank: int) -> jax.Array:
    """This rank's slice of all, in the order of ranks."""
    addends = [rows[rank] if other == rank else arriving[0, other] for other in range(len(rows))]
    return reduce(jnp.add, addends)


@partial(jax.jit, static_argnums=(2, 3))
def _unpack(arriving: jax.Array, own: jax.Array, rank: int, shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
    """The parts, out of all slices."""
    flat = arriving[1].at[rank].set(own).reshape(-1)
    sizes = [int(np.prod(shape)) for shape in shapes]
    ends = np.cumsum(sizes)
    return [flat[end - n : end].reshape(shape) for n, end, shape in zip(sizes, ends, shapes, strict=True)]


# --- what MPI reaches -------------------------------------------------------------------------------------------------


def agreed(everyone: Sequence[DeviceAccess], *, one_host: bool) -> str:
    """Why large sums go through the host, or "".

    Args:
      everyone: by rank.
      one_host: whether all are on one. Between several it depends on the network what is fast, which MPI does not say.
    """
    for rank, own in enumerate(everyone):
        if own.why_not:
            return own.why_not if len({r.why_not for r in everyone}) == 1 else f"on rank {rank} {own.why_not}"
    if not one_host:
        return "processes are on several hosts"
    for rank, own in enumerate(everyone):
        for other, its in enumerate(everyone):
            if its.device not in own.seen:
                return f"rank {rank} does not see the GPU of rank {other}, as MPI would have to"
    return ""


def reach(mpi: Any, device: jax.Device) -> DeviceAccess:
    """Which memory MPI reaches for this process. Local."""
    why = why_not(mpi, device)
    if why:
        return DeviceAccess(why)
    cuda.make_current(device)
    return DeviceAccess("", *cuda.seen(cuda.number(device)))


def why_not(mpi: Any, device: jax.Device) -> str:
    """Why MPI is not to read the memory of a device, in words; "" where it is."""
    if device.platform == "cpu":
        return "there is no accelerator"
    if not cuda.is_nvidia(device):
        return "devices are not NVIDIA's"
    return "" if says_cuda(mpi) else "MPI is not CUDA-aware"


def says_cuda(mpi: Any) -> bool:
    """Whether MPI itself says that it takes CUDA's memory: what was built so, and not switched off."""
    library = ctypes.CDLL(mpi.__file__)  # what mpi4py has loaded is found through it
    if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI, and MPICH
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):  # others that come from MPICH
        answer = ctypes.c_int(0)
        return library.MPIX_GPU_query_support(_MPICH_CUDA, ctypes.byref(answer)) == 0 and bool(answer.value)
    return False


def prepare(devices: Sequence[jax.Device] | None = None, environ: Mapping[str, str] = os.environ) -> None:
    """Before MPI is loaded: give this thread the context of the GPU that it will use. Open MPI looks for one when it
    begins, and without one it never maps the memory of other processes' GPUs, but copies it in pieces through the host.

    Args:
      devices: this process's, if they are known; else that of its number on its host.
    """
    found = jax.local_devices() if devices is None else devices
    local = next((int(environ[name]) for name in _LOCAL_RANKS if environ.get(name, "").isdigit()), 0)
    device = found[local % len(found)] if devices is None else found[0]
    if cuda.is_nvidia(device):
        cuda.make_current(device)
