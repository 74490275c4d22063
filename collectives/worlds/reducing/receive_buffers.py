"""Receive buffers of messages that are reduced on the host, and JAX arrays that alias them."""

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

from .algorithms import has_algorithms, is_large

ALIGNMENT = 64  # bytes; XLA on CPU uses such buffers without a copy

NOTHING: Mapping[int, jax.Array] = MappingProxyType({})

MessageLayout = tuple[PartSpec, ...]


class Buffers:
    """One buffer per part of a message, and JAX arrays that alias these buffers.

    Attributes:
      aliases: the buffers as arrays on JAX's default CPU device, without a copy; empty before `renew`.
    """

    def __init__(self, layout: MessageLayout):
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype, _ in layout]
        starts = [0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        # One allocation for all: numpy requests huge pages from 4 MB on, by which ranks read each other's memory faster
        # (ResNet-50's gradients, whole tensors: 21 ms; 28 with an allocation for each).
        memory = np.empty(starts[-1] + ALIGNMENT, np.uint8)
        offset = -memory.ctypes.data % ALIGNMENT
        self.buffers = [
            memory[offset + start : offset + start + size].view(dtype).reshape(shape)
            for start, size, (shape, dtype, _) in zip(starts, sizes, layout, strict=False)
        ]
        self._default = jax.local_devices(backend="cpu")[0]
        self.aliases: list[jax.Array] = []

    def is_default(self, device: jax.Device) -> bool:
        """Return whether `aliases` are on this device."""
        return bool(device == self._default)

    def renew(self) -> None:
        """Make the missing aliases: all at first, and later those that were donated."""
        known: Sequence[jax.Array | None] = self.aliases or [None] * len(self.buffers)
        self.aliases = [
            jax.dlpack.from_dlpack(buffer) if alias is None or alias.is_deleted() else alias
            for alias, buffer in zip(known, self.buffers, strict=True)
        ]

    def arrays(
        self, devices: Sequence[jax.Device], elsewhere: Mapping[int, jax.Array] = NOTHING
    ) -> list[list[jax.Array]]:
        """Return the buffers' contents on each device; `elsewhere`: parts that are arrays on the first device."""
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
    """Receive buffers of a message over MPI.

    Attributes:
      text: the layout of the message, in words; `name`: a number for it.
      in_preamble: the part of the preamble in which part 0 is reduced, in double precision; None if there is no room.
      free: receives the status: at the end of part 0 in the preamble; or in the preamble by itself; or, if that lacks
        room, in the buffer of part 0.
      status_in_preamble: whether it is one of the first two.
      has_algorithms: whether there are several algorithms for it between hosts.
      large_others: whether it has large sums other than part 0.
    """

    def __init__(self, layout: MessageLayout, status: int, room: np.ndarray):
        super().__init__(layout)
        self.text = describe_layout(layout, status)
        self.name = crc32(self.text.encode())
        parts = [(op, x.nbytes) for x, (_, _, op) in zip(self.buffers, layout, strict=True)]
        self.has_algorithms = any(has_algorithms(*part) for part in parts)
        self.large_others = any(is_large(*part) for part in parts[1:])
        first = self.buffers[0]
        self.in_preamble = room[: len(first)] if len(first) <= len(room) else None
        self.status_in_preamble = status <= len(room)
        where = self.in_preamble if self.in_preamble is not None else room if self.status_in_preamble else first
        self.free = where[len(where) - status :]


def describe_layout(layout: MessageLayout, status: int) -> str:
    """Return the layout of a message in words."""
    return f"{', '.join(f'{op} {dtype}{list(shape)}' for shape, dtype, op in layout)}; status {status}"


def check_dtypes(layout: Sequence[PartSpec]) -> None:
    """Raise unless MPI can reduce all parts.

    Raises:
      CollectiveError: it cannot reduce one of them.
    """
    for j, (_, dtype, _) in enumerate(layout):
        if dtype.kind not in "iufc" or dtype == np.float16:
            raise CollectiveError(
                f"part {j} of a message is {dtype}, which MPI cannot reduce. Send a type of C: half precisions as "
                "float32, booleans as uint8."
            )


def round_to(wide: np.ndarray, received: np.ndarray) -> None:
    """Round a sum in double precision to the dtype of `received`; values beyond its range become infinite."""
    with np.errstate(over="ignore"):
        received[:] = wide


def keys(x: np.ndarray, op: str) -> np.ndarray:
    """Return integers in the order of floats; NaN comes first for "min" and last for "max", so that it is kept."""
    x = np.where(np.isnan(x), np.copysign(np.array(np.nan, x.dtype), 1 if op == "max" else -1), x)
    return _flip(x.view(f"i{x.itemsize}"))


def from_keys(keys: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the floats of `keys`."""
    return _flip(keys).view(dtype)


def _flip(bits: np.ndarray) -> np.ndarray:
    """Convert sign and magnitude (floats) to two's complement (integers), or back: it is its own inverse."""
    return np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)
