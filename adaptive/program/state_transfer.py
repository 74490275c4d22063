"""Transfer of a program's state to joining processes, from memory to memory.

It is more than a checkpoint holds, because the run goes on: pending sizes, the digest of decisions, the run's limit.
Local state (`per_worker_state`) is not transferred: on a new worker it has its initial value.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from adaptive.base.world_members import TransferPayload

from .parts import ProgramParts


def pack(parts: ProgramParts, progress: Any) -> TransferPayload:
    """Return the state of this process's program. All steps were shown to the hooks (`Hooks.catch_up`).

    Args:
      progress: of the run; can be pickled.

    Returns:
      What is small, to be pickled; and the replicated arrays of the engine, contiguous.
    """
    stream = parts.stream.cursors, parts.stream.place()
    small = [progress, *(part.export() for part in _small_parts(parts)), parts.skipped.in_a_row, stream]
    return small, parts.engine.workers.export()


def receive_buffers(parts: ProgramParts) -> list[np.ndarray]:
    """Return arrays into which a joining process receives those of `pack`: the memory of its own, where possible.

    To map new memory takes several times as long as to write into memory that is mapped.
    """
    return parts.engine.workers.receive_buffers()


def unpack(parts: ProgramParts, received: TransferPayload) -> Any:
    """Replace the state of this process's program with what another one packed. Returns the `progress` given there."""
    (progress, *exported, in_a_row, (cursors, place)), arrays = received
    for part, state in zip(_small_parts(parts), exported, strict=True):
        part.adopt(state)
    parts.skipped.in_a_row = in_a_row
    parts.stream.go_on(cursors, place)
    parts.engine.workers.adopt(arrays)
    parts.hyperparameters.restart()
    return progress


def _small_parts(parts: ProgramParts) -> tuple[Any, ...]:
    return parts.sizes, parts.membership, parts.digest, parts.members, parts.hooks
