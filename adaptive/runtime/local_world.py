"""A world of this process alone, whose workers run one after another on one device: the default world of a program.

With one worker it is equivalent to `collectives.SoloWorld`. With several it simulates a cluster, in checks and tests.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextvars import Token
from functools import lru_cache, partial, reduce
from typing import Self

import jax
import numpy as np

from adaptive.base.channel import Arrived, Channel, LoneChannel, PartSpec, SentMessage
from adaptive.base.reductions import Mixed, Reduction, Sliced, combine_microbatches
from adaptive.base.values.current import enter, leave
from adaptive.base.worker_slots import WorkerSlots
from adaptive.base.world import World


class LocalWorld(WorkerSlots, World):
    """Workers that run one after another on one device. They may `leave` and `join` between two steps.

    Its `with` block makes it the current world, as for the worlds of `collectives`.

    Args:
      worker_slots: number of worker slots.
      device: the device; by default JAX's default device.
      workers: number of workers at the start; the others are in reserve. By default all slots are occupied.
    """

    def __init__(self, worker_slots: int = 1, device: jax.Device | None = None, *, workers: int | None = None):
        super().__init__(worker_slots, workers)
        self._tokens: list[Token[World | None]] = []  # of the `with` blocks that are open
        self.workers = range(worker_slots)
        self.devices = (device or jax.local_devices()[0],) * worker_slots

    def __enter__(self) -> Self:
        self._tokens.append(enter(self))
        return self

    def __exit__(self, *exc: object) -> None:
        leave(self, self._tokens.pop())

    def channel(self, parts: Sequence[PartSpec], status: int, name: Hashable = 0) -> Channel:
        named = all(isinstance(part.op, str) for part in parts)
        alone = self.capacity == 1 and named and type(self) is LocalWorld  # subclasses may override `exchange`
        return LoneChannel() if alone else super().channel(parts, status, name)

    def exchange(self, message: SentMessage, ops: Sequence[Reduction], name: Hashable = 0) -> Arrived:
        parts = zip(*message.parts, strict=True)
        columns = [self._reduce(op, column, message.step) for op, column in zip(ops, parts, strict=True)]
        return [list(row) for row in zip(*columns, strict=True)], message.status

    def _reduce(self, op: Reduction, column: Sequence[jax.Array], step: int) -> Sequence[jax.Array]:
        """Return a part, reduced over all workers, for each of them."""
        if isinstance(op, Mixed):
            return op.in_one_place(column, step, self.members)
        if isinstance(op, Sliced):
            one = _compiled(op)(list(column), np.int32(step))
        else:
            one = reduce(partial(combine_microbatches, op), column)
        return [one] * len(column)


@lru_cache(maxsize=64)
def _compiled(op: Sliced) -> Callable[..., jax.Array]:
    return jax.jit(op.in_one_place)
