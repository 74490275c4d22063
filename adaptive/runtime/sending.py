"""Send a message of a step, with the status and the check for values that are not finite."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from adaptive.base.channel import Arriving, LookAtPiece
from adaptive.base.timeline import STEPS, Timeline
from adaptive.base.world import World

from .finite import FiniteCheck
from .step_plan import StepContext

_NO_STATUS = np.zeros(0)


class InFlight(NamedTuple):
    """A message that is being exchanged."""

    number: int
    arriving: Arriving
    check: FiniteCheck | None


def send(
    ctx: StepContext,
    number: int,
    parts: Sequence[Sequence[jax.Array]],
    step: int,
    more: str,
    still_computes: Callable[[], bool] | None,
) -> InFlight:
    """Send a message, with the status if it is the message for it.

    Args:
      parts: of the message, by local index.
      step: its number, from 1.
      more: added to the error if processes are in different collectives.
      still_computes: says whether this process still computes a later stage; `None` after the last.
    """
    steps = ctx.step_plan
    own = ctx.status.encode() if number == steps.status_message else _NO_STATUS
    own, about = own.astype(parts[0][0].dtype), steps.about(number, step)
    parts = ctx.neutral.with_gaps(number, parts)
    check = steps.finite_checks[number] if steps.finite_checks else None
    on_piece: LookAtPiece | None = None if check is None else check.begin()
    if ctx.timeline is not None:
        ctx.timeline.sends(about)
        on_piece = pieces_on(ctx.timeline, on_piece, ctx.world)
    ctx.activity.message = number
    return InFlight(number, ctx.channels[number].start(parts, own, about, more, on_piece, step, still_computes), check)


def pieces_on(timeline: Timeline, on_piece: LookAtPiece | None, world: World) -> LookAtPiece:
    """Return `on_piece`, which also records on a timeline when each piece of a message has arrived."""
    began, waited = time.perf_counter(), world.waited

    def record(part: int, start: int, piece: np.ndarray) -> None:
        nonlocal began, waited
        timeline.add(STEPS, f"part {part}", began + world.waited - waited, elements=piece.size, first=start)
        if on_piece is not None:
            on_piece(part, start, piece)
        began, waited = time.perf_counter(), world.waited

    return record
