"""A world of one worker."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import jax

from adaptive.base.channel import LoneChannel, PartSpec

from .base import WorldBase, describe


class SoloWorld(WorldBase):
    """One process, one worker: a message is its own reduction.

    Args:
      device: where the worker computes; JAX's first by default.
    """

    capacity = 1
    workers = range(1)

    def __init__(self, device: jax.Device | None = None):
        super().__init__()
        self.devices: Sequence[jax.Device] = (jax.local_devices()[0] if device is None else device,)

    def channel(self, parts: Sequence[PartSpec], status: int, name: Hashable = 0) -> LoneChannel:
        """Return a channel for messages of one layout: see `World.channel`."""
        return LoneChannel(self.lifetime.check_open)

    def __repr__(self) -> str:
        return f"SoloWorld(1 worker on {describe(self.devices)})"
