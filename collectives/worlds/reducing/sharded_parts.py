"""Parts of a message that are sharded over a worker's mesh, as arrays on the host, and back.

Each element is sent once, from one of the devices that have it. What arrives is put on all devices that need it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice

import jax
import numpy as np
from jax.sharding import Sharding

from adaptive import CollectiveError
from adaptive.base.channel import PartSpec
from adaptive.base.local_mesh import DeviceParts


class ShardedParts:
    """Cuts the parts of messages of one layout along their shardings.

    Args:
      layout: see `World.channel`.
      whole: the sharding of parts without one: a copy on each device.

    Attributes:
      layout: that of the message in pieces.

    Raises:
      CollectiveError: a part has a reduction that needs whole values on one device.
    """

    def __init__(self, layout: Sequence[PartSpec], whole: Sharding):
        for part in layout:
            if not isinstance(part.op, str):
                raise CollectiveError(f"{part.op} is not available where a worker is a mesh.")
        self._shards = [DeviceParts(part.shape, part.sharding or whole) for part in layout]
        self._devices = [device for shards in self._shards for device in shards.devices]
        self.layout = [
            PartSpec(shape, part.dtype, part.op)
            for part, shards in zip(layout, self._shards, strict=True)
            for shape in shards.shapes
        ]

    def cut(self, parts: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the pieces of all parts, each on one device."""
        return [piece for part, shards in zip(parts, self._shards, strict=True) for piece in shards.of(part)]

    def joined(self, pieces: Sequence[np.ndarray]) -> list[jax.Array]:
        """Return the parts that consist of these pieces, whose memory they may share. Waits for copies to devices."""
        rest: Iterator[np.ndarray] = iter(pieces)
        each = [shards.by_device(list(islice(rest, len(shards.shapes)))) for shards in self._shards]
        # In one call, which takes half the time of one for each piece.
        placed: Iterator[jax.Array] = iter(jax.device_put(list(chain.from_iterable(each)), self._devices))
        found = [shards.joined(list(islice(placed, len(shards.devices)))) for shards in self._shards]
        return jax.block_until_ready(found)
