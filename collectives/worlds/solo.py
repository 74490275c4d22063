"""A world of one worker."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import jax
from jax.sharding import Mesh

from adaptive.base.channel import LoneChannel, PartSpec
from adaptive.base.local_mesh import LocalMesh

from .base import WorldBase, describe


class SoloWorld(WorldBase):
    """One process, one worker: a message is its own reduction.

    Args:
      device: where the worker computes; JAX's first by default.
      mesh, batch_axes: the mesh of devices on which it computes instead: see `world`.
    """

    capacity = 1
    workers = range(1)

    def __init__(
        self,
        device: jax.Device | None = None,
        *,
        mesh: Mesh | None = None,
        batch_axes: str | Sequence[str] | None = None,
    ):
        super().__init__()
        self.local_mesh = None if mesh is None else LocalMesh(mesh, batch_axes)
        first = jax.local_devices()[0] if self.local_mesh is None else self.local_mesh.device
        self.devices: Sequence[jax.Device] = (first if device is None else device,)

    def channel(self, parts: Sequence[PartSpec], status: int, name: Hashable = 0) -> LoneChannel:
        """Return a channel for messages of one layout: see `World.channel`."""
        return LoneChannel(self.lifetime.check_open)

    def __repr__(self) -> str:
        return f"SoloWorld(1 worker on {self.local_mesh or describe(self.devices)})"
