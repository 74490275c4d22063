"""Worlds in which each worker is one device of a mesh, so that a whole step can be one XLA program over that mesh."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from .reductions import Mixed, Reduction, Sliced


class WorkerMesh:
    """The mesh of a world's workers, and how messages are reduced within a program over it. The methods are those of a
    lone worker; other worlds override them.

    Args:
      devices: those of all workers, in their order.

    Attributes:
      mesh: one axis, `axis`; its devices are the workers'.
      axis: the name of that axis.
    """

    axis = "worker"

    def __init__(self, devices: Sequence[jax.Device]):
        self.mesh = Mesh(np.array(devices), (self.axis,))

    def prepare(self, parts: Sequence[jax.ShapeDtypeStruct], ops: Sequence[Reduction]) -> None:
        """Compile the programs by which host steps reduce messages of these parts. Blocks until they are compiled.

        Args:
          parts: of one worker.
          ops: one for each part; `reduces` knows them.
        """

    def reduces(self, op: Reduction) -> bool:
        """Return whether `reduce_within` knows this reduction. Not `Mixed`, whose weights are computed on the host."""
        return not isinstance(op, Mixed)

    def reduce_within(self, parts: Sequence[jax.Array], ops: Sequence[Reduction], step: jax.Array) -> list[jax.Array]:
        """Reduce one worker's parts over all workers; traced within a `jax.shard_map` over the mesh.

        Args:
          parts: of one message.
          ops: one for each part; `reduces` knows them.
          step: number of the step, counted from 1; a scalar of int32.

        Returns:
          The reduced parts; replicated.
        """
        each = zip(parts, ops, strict=True)
        return [op.in_one_place([x], step) if isinstance(op, Sliced) else x for x, op in each]
