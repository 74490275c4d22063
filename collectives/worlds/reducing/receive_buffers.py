"""Where messages arrive that are reduced on the host: buffers, and JAX arrays that are these buffers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from zlib import crc32

import jax
import numpy as np

from adaptive import CollectiveError
from adaptive.extend import PartSpec

from .algorithms import has_ways, is_large

ALIGNMENT = 64  # bytes; XLA on CPU takes buffers so aligned as they are, and copies others

NOTHING: Mapping[int, jax.Array] = MappingProxyType({})

MessageLayout = tuple[PartSpec, ...]


class Buffers:
    """One buffer per part of a message, and JAX arrays that are these buffers.

    Attributes:
      aliases: the buffers as arrays on JAX's default CPU device, without a copy; none before `renew`.
    """

    def __init__(self, layout: MessageLayout):
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
        self._default = jax.local_devices(backend="cpu")[0]
        self.aliases: list[jax.Array] = []

    def is_default(self, device: jax.Device) -> bool:
        """Whether `aliases` are on this device."""
        return bool(device == self._default)

    def renew(self) -> None:
        """Make the aliases that are missing: all at first, and later those that were donated."""
        known: Sequence[jax.Array | None] = self.aliases or [None] * len(self.buffers)
        self.aliases = [
            jax.dlpack.from_dlpack(buffer) if alias is None or alias.is_deleted() else alias
            for alias, buffer in zip(known, self.buffers, strict=True)
        ]

    def arrays(
        self, devices: Sequence[jax.Device], elsewhere: Mapping[int, jax.Array] = NOTHING
    ) -> list[list[jax.Array]]:
        """The buffers' contents on each device; and parts that arrived elsewhere, on the first one."""
        if self._default in devices:
            self.renew()
        if elsewhere:
            return self._with(elsewhere, devices)
        if devices[0] == self._default and len(devices) == 1:
            return [self.aliases[:]]
        rows = [
            self.aliases[:] if device == self._default else jax.device_put(self.buffers, [device] * len(self.buffers))
            for device in devices
        ]
        return jax.block_until_ready(rows)

    def _with(self, elsewhere: Mapping[int, jax.Array], devices: Sequence[jax.Device]) -> list[list[jax.Array]]:
        here = [j for j in range(len(self.buffers)) if j not in elsewhere]
        rows = []
        for number, device in enumerate(devices):
            row = dict(elsewhere) if number == 0 else {j: jax.device_put(x, device) for j, x in elsewhere.items()}
            for j in here:
                row[j] = self.aliases[j] if device == self._default else jax.device_put(self.buffers[j], device)
            rows.append([row[j] for j in range(len(row))])
        return jax.block_until_ready(rows)


class ReceiveBuffers(Buffers):
    """Where a message arrives over MPI.

    Attributes:
      text: what the message is made of.
      name: a number for it.
      in_frame: where part 0 is reduced in the frame, in double precision, if there is room for it; else `None`.
      free: where the status is reduced: at the end of part 0 in the frame; or in the frame by itself; or, if that lacks
        room, in the buffer of part 0.
      status_in_frame: whether it is one of the first two.
      has_ways: whether there are several ways for it between hosts.
      large_others: whether there are large sums in it, but for part 0.
    """

    def __init__(self, layout: MessageLayout, status: int, room: np.ndarray):
        super().__init__(layout)
        self.text = in_words(layout, status)
        self.name = crc32(self.text.encode())
        parts = [(op, x.nbytes) for x, (_, _, op) in zip(self.buffers, layout, strict=True)]
        self.has_ways = any(has_ways(*part) for part in parts)
        self.large_others = any(is_large(*part) for part in parts[1:])
        first = self.buffers[0]
        self.in_frame = room[: len(first)] if len(first) <= len(room) else None
        self.status_in_frame = status <= len(room)
        where = self.in_frame if self.in_frame is not None else room if self.status_in_frame else first
        self.free = where[len(where) - status :]


def in_words(layout: MessageLayout, status: int) -> str:
    """What a message is made of."""
    return f"{', '.join(f'{op} {dtype}{list(shape)}' for shape, dtype, op in layout)}; status {status}"


def check_dtypes(layout: Sequence[PartSpec]) -> None:
    """Raise unless MPI can reduce all parts."""
    for j, (_, dtype, _) in enumerate(layout):
        if dtype.kind not in "iufc" or dtype == np.float16:
            raise CollectiveError(
                f"part {j} of a message is {dtype}, which MPI cannot reduce. Send a type of C: half precisions as "
                "float32, booleans as uint8."
            )


def round_to(wide: np.ndarray, received: np.ndarray) -> None:
    """A sum in double precision, to that of the part; beyond its range it is infinite."""
    with np.errstate(over="ignore"):
        received[:] = wide


def keys(x: np.ndarray, op: str) -> np.ndarray:
    """Integers in the order of floats; NaN comes first for "min" and last for "max", so that it is kept."""
    x = np.where(np.isnan(x), np.copysign(np.array(np.nan, x.dtype), 1 if op == "max" else -1), x)
    return _flip(x.view(f"i{x.itemsize}"))


def from_keys(keys: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return _flip(keys).view(dtype)


def _flip(bits: np.ndarray) -> np.ndarray:
    """From sign and magnitude (floats) to two's complement (integers), and back: it is its own inverse."""
    return np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)
