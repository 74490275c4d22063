"""A world of this process alone, whose workers run one after another on one device: the default world of a program.

With one worker it is what `collectives.SoloWorld` is; with several it stands in for a cluster, in checks and in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial, reduce

import jax
import numpy as np

from adaptive.base.channel import Arrived, Blocking, Channel, LoneChannel, LookAtPiece, Parts, PartSpec
from adaptive.base.mailbox import LocalMailboxes
from adaptive.base.reductions import Gathered, Mixed, Reduction, Sliced, combine_microbatches
from adaptive.base.worker_slots import WorkerSlots


class LocalWorld(Blocking, LocalMailboxes, WorkerSlots):
    """Workers that run one after another on one device. They may `leave` and `join` between two steps.

    Args:
      worker_slots: how many there can be.
      device: JAX's default device if not given.
      workers: how many there are at first; the rest are in reserve. By default all.
    """

    rank, processes = 0, 1

    def __init__(self, worker_slots: int = 1, device: jax.Device | None = None, *, workers: int | None = None):
        super().__init__(worker_slots, workers)
        self.workers = range(worker_slots)
        self.devices = (device or jax.local_devices()[0],) * worker_slots

    def channel(self, parts: Sequence[PartSpec], status: int, name: Hashable = 0) -> Channel:
        named = all(isinstance(part.op, str) for part in parts)
        alone = self.capacity == 1 and named and type(self) is LocalWorld  # what is derived may exchange otherwise
        return LoneChannel() if alone else super().channel(parts, status, name)

    def exchange(
        self,
        parts: Sequence[Parts],
        ops: Sequence[Reduction],
        status: np.ndarray,
        channel: Hashable = 0,
        about: str = "",
        more: str = "",
        look: LookAtPiece | None = None,
        step: int = 0,
    ) -> Arrived:
        columns = [self._reduce(op, column, step) for op, column in zip(ops, zip(*parts, strict=True), strict=True)]
        return [list(row) for row in zip(*columns, strict=True)], status

    def _reduce(self, op: Reduction, column: Sequence[jax.Array], step: int) -> Sequence[jax.Array]:
        """Return a part, reduced over all workers, for each of them."""
        if isinstance(op, Mixed):
            return op.in_one_place(column, step, self.members)
        if isinstance(op, Sliced):
            one = _compiled(op)(list(column), np.int32(step))
        elif isinstance(op, Gathered):
            one = op.in_one_place(column)
        else:
            one = reduce(partial(combine_microbatches, op), column)
        return [one] * len(column)

    def all_gather_bytes(self, value: bytes, about: str = "", more: str = "") -> list[bytes]:
        return [value]

    def barrier(self) -> None:
        return None

    def fail(self, why: str) -> None:
        return None


@lru_cache(maxsize=64)
def _compiled(op: Sliced) -> Callable[..., jax.Array]:
    return jax.jit(op.in_one_place)
