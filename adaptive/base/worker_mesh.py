"""Worlds in which each worker is one device of a mesh, so that a whole step can be one XLA program over that mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax
from jax.sharding import Mesh

from .reductions import Reduction


class WorkerMesh(Protocol):
    """The mesh of a world's workers, and how messages are reduced within a program over it.

    Attributes:
      mesh: one axis, `axis`; its devices are the workers', in their order.
      axis: the name of that axis.
    """

    @property
    def mesh(self) -> Mesh:
        """The workers' devices."""
        ...

    @property
    def axis(self) -> str:
        """The name of the mesh's axis."""
        ...

    def prepare(self, parts: Sequence[jax.ShapeDtypeStruct], ops: Sequence[Reduction]) -> None:
        """Compile the programs that `World.start` needs for messages of these parts. Blocks until they are compiled.

        Args:
          parts: of one worker.
          ops: one for each part; `reduces` knows them.
        """
        ...

    def reduces(self, op: Reduction) -> bool:
        """Return whether `reduce_within` knows this reduction."""
        ...

    def reduce_within(self, parts: Sequence[jax.Array], ops: Sequence[Reduction], step: jax.Array) -> list[jax.Array]:
        """Reduce one worker's parts over all workers; traced within a `jax.shard_map` over the mesh.

        Args:
          parts: of one message.
          ops: one for each part; `reduces` knows them.
          step: number of the step, counted from 1; a scalar of int32.

        Returns:
          The reduced parts; replicated.
        """
        ...
