"""Worlds in which each worker is one device of a mesh, so that a whole step can be one XLA program over that mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh

from .reductions import Reduction

T = TypeVar("T")


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


@runtime_checkable
class OffersMesh(Protocol):
    """The methods of a world on one mesh, besides those of `World`."""

    def worker_mesh(self) -> WorkerMesh | None:
        """Return the mesh of all workers; `None` if a program over all of them is no faster than messages.
        Replicated.
        """
        ...

    def run_on_mesh(self, program: Callable[[np.ndarray], T], status: np.ndarray, about: str = "", more: str = "") -> T:
        """Call `program` once every process has made this call, and return its result.

        No other collective of this process runs at the same time: two programs with collectives, dispatched by two
        threads, could start in different orders on two devices and deadlock.

        Args:
          program: dispatches a program over the mesh and waits for its results. Its argument is the status, summed over
            all processes; replicated.
          status: what this process adds to that sum; floating, one-dimensional, of one length on all processes.
          about, more: see `World`.

        Raises:
          DisagreementError: the processes' calls differ. On every process, before any has called `program`.
          WorkerError: a process has called `fail`, on every other process, before any has called `program`; or a
            process was lost, also while the programs ran.
          CollectiveError: the world is closed.
        """
        ...
