"""A world of one worker."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import jax
import numpy as np

from adaptive.base.channel import Arrived, Channels, LoneChannel, Parts, PartSpec
from adaptive.base.mailbox import LocalMailboxes

from .base import FixedMembers, WorldBase, describe


class SoloWorld(Channels, LocalMailboxes, FixedMembers, WorldBase):
    """One process, one worker: a message is its own reduction.

    Args:
      device: where the worker computes; JAX's first by default.
    """

    capacity = 1
    rank = 0
    processes = 1
    workers = range(1)

    def __init__(self, device: jax.Device | None = None):
        WorldBase.__init__(self)
        Channels.__init__(self)
        self.devices: Sequence[jax.Device] = (jax.local_devices()[0] if device is None else device,)

    def channel(self, parts: Sequence[PartSpec], status: int, name: Hashable = 0) -> SoloChannel:
        """Return a channel for messages of one layout: see `World.channel`."""
        return SoloChannel(self)

    def all_gather_bytes(self, value: bytes, about: str = "", more: str = "") -> list[bytes]:
        """Return the only process's value."""
        self.lifetime.check_open()
        return [value]

    def barrier(self) -> None:
        """Return at once: there is one process."""
        self.lifetime.check_open()

    def __repr__(self) -> str:
        return f"SoloWorld(1 worker on {describe(self.devices)})"


class SoloChannel(LoneChannel):
    """A channel of a `SoloWorld`: see `Channel`."""

    def __init__(self, world: SoloWorld):
        self._world = world

    def exchange(
        self,
        parts: Sequence[Parts],
        status: np.ndarray,
        about: str = "",
        more: str = "",
        step: int = 0,
    ) -> Arrived:
        """Return the parts and the status, as given: see `Channel.exchange`."""
        if self._world.lifetime.closed:
            self._world.lifetime.check_open()
        return [list(parts[0])], status
