"""Transfer of a program's state to joining processes, from memory to memory.

The transferred state includes more than a checkpoint, because the run continues: pending sizes, the digest of
decisions, the run's limit. Local state (`per_worker_state`) is not transferred: it has its initial value on a new
worker.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from adaptive.base.world import TransferPayload

from .parts import ProgramParts


def pack(parts: ProgramParts, progress: Any) -> TransferPayload:
    """Return the state of this process's program. Call `Hooks.catch_up` first.

    Args:
      progress: the progress of the run; picklable.

    Returns:
      (A small picklable object, the engine's replicated arrays). The arrays are contiguous.
    """
    stream = parts.stream.cursors, parts.stream.place()
    small = [progress, *(part.export() for part in _small_parts(parts)), parts.skipped.in_a_row, stream]
    return small, parts.engine.workers.export()


def receive_buffers(parts: ProgramParts) -> list[np.ndarray]:
    """Return arrays into which a joining process receives the arrays of `pack`.

    Reuses the memory of the process's own state if possible: mapping new memory takes several times as long as writing.
    """
    return parts.engine.workers.receive_buffers()


def unpack(parts: ProgramParts, received: TransferPayload) -> Any:
    """Replace the state of this process's program by a result of `pack`. Returns its `progress`."""
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
