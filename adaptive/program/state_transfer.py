"""Transfer of a program's state to joining processes, from memory to memory.

It is more than a checkpoint holds, because the run goes on: pending sizes, the digest of decisions, the run's limit.
Local state (`per_worker_state`) is not transferred: on a new worker it has its initial value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from adaptive.base.world import TransferPayload
from adaptive.control.batch_sizes import BatchSizes
from adaptive.control.decision_digest import DecisionDigest
from adaptive.control.hooks import Hooks
from adaptive.control.hyperparameters import Hyperparameters
from adaptive.control.membership import Membership
from adaptive.data.stream import Stream
from adaptive.runtime.engine import Engine

from .member_tracker import MemberTracker
from .step_checks import SkippedSteps


class ProgramParts(NamedTuple):
    """The parts of a program whose state changes from step to step."""

    engine: Engine
    hooks: Hooks
    hyperparameters: Hyperparameters
    sizes: BatchSizes
    membership: Membership
    members: MemberTracker
    digest: DecisionDigest
    stream: Stream
    skipped: SkippedSteps


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
