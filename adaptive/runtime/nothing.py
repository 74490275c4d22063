"""What a worker without examples sends: what changes no sum and no extreme, made once.

For seats that no process carries the one with rank 0 says the same.

Its weights are 0, and its contributions the neutral elements of what they are combined by. Its row in what is gathered
is NaN, or 0 among integers: nothing was computed there.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from adaptive.base.channel import Parts
from adaptive.base.world import World
from adaptive.graph.plan import Contribution, Plan

from .message import Entry, Layout


class Nothing:
    """Messages' parts, and what calls would have kept, of workers that make no calls.

    Args:
      world: whose workers they are.
    """

    def __init__(self, plan: Plan, layouts: Sequence[Layout], world: World):
        self._plan, self._layouts, self._world = plan, layouts, world
        self._devices, self._first = world.devices, world.workers.start
        self._gaps: dict[tuple[int, tuple[int, ...]], dict[int, np.ndarray]] = {}
        self._parts: dict[tuple[int, int], list[jax.Array]] = {}
        self._kept: dict[tuple[int, int], list[jax.Array]] = {}

    def parts(self, level: int, local: int) -> list[jax.Array]:
        """The messages of one level, of worker `local`, on its device."""
        if (level, local) not in self._parts:
            sent = [self._layouts[number] for number in self._plan.sent_at(level)]
            host = [part for layout in sent for part in parts_of_nothing(layout, self._first + local)]
            self._parts[level, local] = jax.device_put(host, self._devices[local])
        return self._parts[level, local]

    def with_gaps(self, number: int, parts: Sequence[Parts]) -> Sequence[Parts]:
        """The parts of message `number`, by worker of this process, as they are sent: where this process has rank 0,
        with NaN for the rows of seats that no process carries.
        """
        seats = self._world.unowned_slots
        if not seats or self._world.rank:
            return parts
        if (number, seats) not in self._gaps:
            self._gaps[number, seats] = _gaps(self._layouts[number], seats)
        first = list(parts[0])
        for part, indices in self._gaps[number, seats].items():
            host = np.array(first[part])
            host.reshape(-1)[indices] = np.nan
            first[part] = jax.device_put(host, self._devices[0])
        return [first, *parts[1:]]

    def prepare(self) -> None:
        """Have compiled what it takes to fill the rows of lost workers, on a process that may have rank 0 then."""
        for layout in self._layouts:
            _gaps(layout, [self._first])

    def kept(self, level: int, local: int) -> list[jax.Array]:
        """Stand-ins for what a call keeps for the segments behind it, by which nothing that is kept is computed."""
        if (level, local) not in self._kept:
            values = [np.zeros(a.aval.shape, a.aval.dtype) for a in self._plan.calls[level].outputs]
            self._kept[level, local] = jax.device_put(values, self._devices[local])
        return self._kept[level, local]


def _gaps(layout: Layout, seats: Sequence[int]) -> dict[int, np.ndarray]:
    """By part, where NaN stands for what nobody has computed: in no sum, which may be large."""
    found: dict[int, list[np.ndarray]] = {}
    for c, entry in zip(layout.contributions, layout.entries, strict=True):
        if not c.how.reduces:
            of_seats = [_nothing(c, entry, seat, layout) for seat in seats]
            indices = np.flatnonzero(np.isnan(sum(of_seats)))
            if len(indices):
                found.setdefault(entry.part, []).append(entry.offset + indices)
    return {part: np.concatenate(indices) for part, indices in found.items()}


def _nothing(c: Contribution, entry: Entry, worker: int, layout: Layout) -> np.ndarray:
    """What a worker sends of one contribution, flat."""
    return np.asarray(c.how.encode_nothing(c.value.aval.shape, entry.dtype, worker, layout.capacity)).reshape(-1)


def parts_of_nothing(layout: Layout, worker: int) -> list[np.ndarray]:
    """What worker number `worker` adds to a message for which it has computed nothing."""
    parts = [np.zeros(part.shape, part.dtype) for part in layout.parts]
    for c, entry in zip(layout.contributions, layout.entries, strict=True):
        parts[entry.part].reshape(-1)[entry.offset : entry.offset + entry.size] = _nothing(c, entry, worker, layout)
    return parts
