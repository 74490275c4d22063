"""Receive buffers of messages that are reduced on the host, and JAX arrays that alias them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from zlib import crc32

import jax
import numpy as np

from adaptive import CollectiveError
from adaptive.base.channel import PartSpec

ALIGNMENT = 64  # bytes; XLA on CPU uses such buffers without a copy

MessageLayout = tuple[PartSpec, ...]


class ReceiveBuffers:
    """One buffer per part of a message over MPI, and JAX arrays that alias these buffers.

    Attributes:
      aliases: the buffers as arrays on JAX's default CPU device, without a copy; empty before `renew`.
      text: description of the message's layout.
      name: a checksum of the layout.
      in_preamble: the section of the preamble in which part 0 is reduced, in double precision; None if it has no room.
      free: receives the status: after part 0 in the preamble, alone in the preamble, or in part 0's buffer, whichever
        is the first to have room.
      status_in_preamble: whether the status is reduced in the preamble.
    """

    def __init__(self, layout: MessageLayout, status: int, room: np.ndarray):
        self.buffers = _allocated(layout)
        self._default = jax.local_devices(backend="cpu")[0]
        self.aliases: list[jax.Array] = []
        self.text = describe_layout(layout, status)
        self.name = crc32(self.text.encode())
        first = self.buffers[0]
        self.in_preamble = room[: len(first)] if len(first) <= len(room) else None
        self.status_in_preamble = status <= len(room)
        where = self.in_preamble if self.in_preamble is not None else room if self.status_in_preamble else first
        self.free = where[len(where) - status :]

    def is_default(self, device: jax.Device) -> bool:
        """Return whether `aliases` are on this device."""
        return bool(device == self._default)

    def renew(self) -> None:
        """Create missing aliases: at first all, later those that were donated."""
        known: Sequence[jax.Array | None] = self.aliases or [None] * len(self.buffers)
        self.aliases = [
            jax.dlpack.from_dlpack(buffer) if alias is None or alias.is_deleted() else alias
            for alias, buffer in zip(known, self.buffers, strict=True)
        ]

    def arrays(self, devices: Sequence[jax.Device]) -> list[list[jax.Array]]:
        """Return the buffers' contents on each device."""
        if self._default in devices:
            self.renew()
        if devices[0] == self._default and len(devices) == 1:
            return [self.aliases[:]]
        rows = [
            self.aliases[:] if device == self._default else jax.device_put(self.buffers, [device] * len(self.buffers))
            for device in devices
        ]
        return jax.block_until_ready(rows)


def _allocated(layout: MessageLayout) -> list[np.ndarray]:
    """Return one array per part, aligned so that XLA uses it without a copy."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype, _ in layout]
    starts = [0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
    # One allocation for all: numpy requests huge pages from 4 MB on, which makes reads by other ranks faster
    # (ResNet-50's gradients, whole tensors: 21 ms; 28 with an allocation for each).
    memory = np.empty(starts[-1] + ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % ALIGNMENT
    return [
        memory[offset + start : offset + start + size].view(dtype).reshape(shape)
        for start, size, (shape, dtype, _) in zip(starts, sizes, layout, strict=False)
    ]


def describe_layout(layout: MessageLayout, status: int) -> str:
    """Describe the layout of a message: reduction, dtype and shape of each part."""
    return f"{', '.join(f'{op} {dtype}{list(shape)}' for shape, dtype, op in layout)}; status {status}"


def check_dtypes(layout: Sequence[PartSpec]) -> None:
    """Check that MPI can reduce all parts.

    Raises:
      CollectiveError: MPI cannot reduce the dtype of one of them.
    """
    for j, (_, dtype, _) in enumerate(layout):
        if dtype.kind not in "iufc" or dtype == np.float16:
            raise CollectiveError(
                f"part {j} of a message is {dtype}, which MPI cannot reduce. Cast half precisions to float32, and "
                "booleans to uint8."
            )


def round_to(wide: np.ndarray, received: np.ndarray) -> None:
    """Round a sum in double precision to the dtype of `received`; values beyond its range become infinite."""
    with np.errstate(over="ignore"):
        received[:] = wide


def keys(x: np.ndarray, op: str) -> np.ndarray:
    """Map floats to integers of the same order. NaNs become the extreme of `op`, so that the reduction keeps them."""
    x = np.where(np.isnan(x), np.copysign(np.array(np.nan, x.dtype), 1 if op == "max" else -1), x)
    return _flip(x.view(f"i{x.itemsize}"))


def from_keys(keys: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Map integers back to floats: the inverse of `keys`."""
    return _flip(keys).view(dtype)


def _flip(bits: np.ndarray) -> np.ndarray:
    """Convert sign and magnitude (floats) to two's complement (integers), or back. Its own inverse."""
    return np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)
