"""Worlds in which each worker is one device of a mesh, so that a whole step can be one XLA program over that mesh."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh

from .reductions import Reduction


class WorkerMesh(Protocol):
    """The mesh of a world's workers, and how messages are reduced within a program over it.

    Attributes:
      mesh: one axis, `axis`; its devices are the workers', in their order.
      axis: the name of that axis.
      one_at_a_time: to be held from the dispatch of such a program until its results are ready. Two programs with
        collectives, dispatched by two threads, could start in different orders on two devices and block each other.
    """

    @property
    def mesh(self) -> Mesh:
        """The workers' devices."""
        ...

    @property
    def axis(self) -> str:
        """The name of the mesh's axis."""
        ...

    @property
    def one_at_a_time(self) -> AbstractContextManager[Any]:
        """A lock, shared with all other programs that have collectives."""
        ...

    def prepare(self, parts: Sequence[jax.ShapeDtypeStruct], ops: Sequence[Reduction]) -> None:
        """Compile what `World.start` needs for messages of such parts, waiting for it.

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


@runtime_checkable
class OffersMesh(Protocol):
    """What a world of one mesh has besides the methods of `World`."""

    def worker_mesh(self) -> WorkerMesh | None:
        """Return the mesh of all workers; `None` where a program over all of them is no faster than messages."""
        ...
