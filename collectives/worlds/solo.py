"""A world of one worker."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import jax
import numpy as np

from adaptive.extend import Arrived, Channels, LocalBoards, LoneChannel, LookAtPiece, Parts, PartSpec

from .base import WorldBase, describe


class SoloWorld(Channels, LocalBoards, WorldBase):
    """One process, one worker: what an exchange would reduce is reduced already.

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
        """Return a channel for messages of one layout: the protocol of `World`."""
        return SoloChannel(self)

    def all_gather_bytes(self, value: bytes, about: str = "", more: str = "") -> list[bytes]:
        """The only process's value."""
        self._check_open()
        return [value]

    def barrier(self) -> None:
        """Nobody to wait for."""
        self._check_open()

    def __repr__(self) -> str:
        return f"SoloWorld(1 worker on {describe(self.devices)})"


class SoloChannel(LoneChannel):
    """A channel of a `SoloWorld`: the protocol of `Channel`."""

    def __init__(self, world: SoloWorld):
        self._world = world

    def exchange(
        self,
        parts: Sequence[Parts],
        status: np.ndarray,
        about: str = "",
        more: str = "",
        look: LookAtPiece | None = None,
        step: int = 0,
    ) -> Arrived:
        """Return the parts and the status, as given: the protocol of `Channel`."""
        if self._world._closed:
            self._world._check_open()
        return [list(parts[0])], status
