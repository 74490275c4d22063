"""Neutral contributions, for workers without examples: they change no result.

Weights are 0, and contributions are the neutral elements of their reductions. Rows of gathered values are NaN, or 0 for
integers. For worker slots of no process, rank 0 sends the NaN rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from adaptive.base.channel import Parts
from adaptive.base.world import World
from adaptive.graph.plan import Contribution, Plan

from .message import Entry, Layout
from .placement import Placement
from .segment import Address


class NeutralContributions:
    """Parts of messages and outputs of kernels for workers without examples. Created on first use, and kept."""

    def __init__(self, plan: Plan, layouts: Sequence[Layout], world: World, placements: Sequence[Placement]):
        self._plan, self._layouts, self._world = plan, layouts, world
        self._placements, self._first = placements, world.workers.start
        self._gaps: dict[tuple[int, tuple[int, ...]], dict[int, np.ndarray]] = {}
        self._parts: dict[tuple[int, int], list[jax.Array]] = {}
        self._outputs: dict[tuple[int, int], list[jax.Array]] = {}

    def parts(self, level: int, local_index: int) -> list[jax.Array]:
        """Return one worker's parts of all messages of a level, on its device."""
        if (level, local_index) not in self._parts:
            host = {
                ("part", number, j): part
                for number in self._plan.sent_at(level)
                for j, part in enumerate(neutral_parts(self._layouts[number], self._first + local_index))
            }
            self._parts[level, local_index] = self._put(host, local_index)
        return self._parts[level, local_index]

    def with_gaps(self, number: int, parts: Sequence[Parts]) -> Sequence[Parts]:
        """Return the parts of message `number` that this process sends. Rank 0 fills the gathered rows of worker slots
        of no process with NaN.

        Args:
          parts: by local index.
        """
        slots = self._world.unowned_slots
        if not slots or self._world.rank:
            return parts
        if (number, slots) not in self._gaps:
            self._gaps[number, slots] = _gaps(self._layouts[number], slots)
        first = list(parts[0])
        for part, indices in self._gaps[number, slots].items():
            host = np.array(first[part])
            host.reshape(-1)[indices] = np.nan
            (first[part],) = self._put({("part", number, part): host}, 0)
        return [first, *parts[1:]]

    def prepare(self) -> None:
        """Compile the program that fills the rows of lost workers. Any process may become rank 0."""
        for layout in self._layouts:
            _gaps(layout, [self._first])

    def outputs(self, level: int, local_index: int) -> list[jax.Array]:
        """Return zeros in place of a kernel's outputs. Results computed from them are discarded."""
        if (level, local_index) not in self._outputs:
            kept = enumerate(self._plan.microbatches[level].outputs)
            host = {("microbatch", level, i): np.zeros(a.aval.shape, a.aval.dtype) for i, a in kept}
            self._outputs[level, local_index] = self._put(host, local_index)
        return self._outputs[level, local_index]

    def _put(self, host: dict[Address, np.ndarray], local_index: int) -> list[jax.Array]:
        sharding = self._placements[local_index].sharding
        return jax.device_put(list(host.values()), [sharding(address, x.shape) for address, x in host.items()])


def _gaps(layout: Layout, slots: Sequence[int]) -> dict[int, np.ndarray]:
    """Return for each part the indices of NaN in the gathered rows of these worker slots. Reduced values have none."""
    found: dict[int, list[np.ndarray]] = {}
    for c, entry in zip(layout.contributions, layout.entries, strict=True):
        if not c.how.reduces:
            by_slot = [_neutral(c, entry, slot, layout) for slot in slots]
            indices = np.flatnonzero(np.isnan(sum(by_slot)))
            if len(indices):
                found.setdefault(entry.part, []).append(entry.offset + indices)
    return {part: np.concatenate(indices) for part, indices in found.items()}


def _neutral(c: Contribution, entry: Entry, worker: int, layout: Layout) -> np.ndarray:
    """Return the neutral element of one contribution, flat."""
    return np.asarray(c.how.encode_nothing(c.value.aval.shape, entry.dtype, worker, layout.capacity)).reshape(-1)


def neutral_parts(layout: Layout, worker: int) -> list[np.ndarray]:
    """Return a message's parts for a worker without examples.

    Args:
      worker: its number in the world.
    """
    parts = [np.zeros(part.shape, part.dtype) for part in layout.parts]
    for c, entry in zip(layout.contributions, layout.entries, strict=True):
        parts[entry.part].reshape(-1)[entry.offset : entry.offset + entry.size] = _neutral(c, entry, worker, layout)
    return parts
