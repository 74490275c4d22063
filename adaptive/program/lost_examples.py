"""A step in which workers are lost goes on with their examples: the others keep what they have computed of their own.

The lost workers' examples are divided among the others, each of which adds some to its own. So a loss late in a step
costs a small part of a step, and not a second one. The division follows from the batch sizes alone, so all processes
agree on it; a process that has not kept its part computes it again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import numpy as np

from adaptive.base.activity import COMPUTING, OTHER
from adaptive.data.stream import Share
from adaptive.operators.sources import Reading
from adaptive.runtime.kernels.choice import Choice
from adaptive.runtime.microbatches import Microbatches, cheapest
from adaptive.runtime.out_of_memory import make_room
from adaptive.runtime.outcome import Outcome
from adaptive.runtime.pieces import Piece, compute_pieces
from adaptive.runtime.steady_step import SteadyStep

from .parts import ProgramParts


class Range(NamedTuple):
    """A part of a step's global batch."""

    start: int
    examples: int


Ranges = tuple[Range, ...]


class _Attempt(NamedTuple):
    """A step in whose message workers were lost."""

    step: int
    ranges: tuple[Ranges, ...]  # of each worker slot
    joined_in_generation: dict[int, int]


class LostExamples:
    """Completes steps in which workers were lost.

    Args:
      parts: the program's parts.
    """

    def __init__(self, parts: ProgramParts):
        self._parts = parts
        self._attempt: _Attempt | None = None
        self._divided: tuple[int, tuple[Ranges, ...] | None] = (-1, None)  # a step, and the ranges if it was divided

    def note_attempt(self) -> None:
        """Record that workers were lost in the message of the current step. Called on all processes, before its members
        change.
        """
        p, (step, ranges) = self._parts, self._divided
        ranges = whole(p.sizes.current) if ranges is None or step != p.run.step else ranges
        self._attempt = _Attempt(p.run.step, ranges, p.members.joined_in_generation)

    def step(self, since: float) -> Outcome | None:
        """Complete the step of the last attempt, if there was one. Communicates.

        Args:
          since: seconds since the start of the previous step.

        Returns:
          The outcome; `None` if the step must be computed as a new one: on all processes, or on one without examples.

        Raises:
          MembersChanged: more workers were lost.
        """
        p, attempt, ranges = self._parts, self._attempt, None
        self._attempt, worker = None, p.world.workers[0]
        steady = p.engine.steady_step(p.sizes.current)
        if steady is None:
            return None
        if attempt is not None and self._may_divide(attempt, steady):
            ranges = divided(attempt.ranges, p.sizes.current)
        self._divided = p.run.step, ranges
        if attempt is None or ranges is None or not ranges[worker]:
            steady.computed = None  # frees its memory
            return None
        p.activity.turn(OTHER)
        with p.activity.same_step():
            return self._complete(steady, ranges[worker], len(attempt.ranges[worker]), since)

    def _may_divide(self, attempt: _Attempt, steady: SteadyStep) -> bool:
        """Return whether the lost workers' examples of a step can be divided among the others. Replicated."""
        p = self._parts
        before, now = attempt.joined_in_generation, p.members.joined_in_generation
        if attempt.step != p.run.step or any(before.get(slot) != since for slot, since in now.items()):
            return False
        return steady.may_divide and p.engine.kernels.timed and p.sizes.resizable and p.stream.has_index

    def _complete(self, steady: SteadyStep, ranges: Ranges, own: int, since: float) -> Outcome:
        p, began = self._parts, time.perf_counter()
        sizes, (worker,) = p.sizes.current, p.world.workers
        p.activity.now, p.activity.waited_before = COMPUTING, p.world.waited
        reading = Reading(
            *(p.run.step, p.seed, worker, sum(sizes), sizes[worker], sizes[worker], 1, ranges[0].start),
            *(p.clock.compute_seconds[0], since, np.asarray(sizes) > 0),
        )
        batch, microbatches = self._compute(steady, reading, ranges, own)
        return steady(
            Share(sizes, (ranges[0].start,), (batch,)),
            reading,
            Choice(sizes[worker], 1, microbatches),
            p.stream.prefetch,
            lambda: p.update.here(p.run.step, in_step=True),
            p.skipped.next_raises,
            p.decisions.last,
            began,
            0.0,
        )

    def _compute(self, steady: SteadyStep, reading: Reading, ranges: Ranges, own: int) -> tuple[Any, Microbatches]:
        """Compute the examples of these ranges, of which the first `own` may be computed already."""
        p, context = self._parts, self._parts.engine.context
        while True:
            pieces = [Piece(part.start, self._microbatches(part), partial(p.stream.read, *part)) for part in ranges]
            try:
                return compute_pieces(steady, context.step_plan.feed, reading, pieces, own)
            except jax.errors.JaxRuntimeError as error:
                make_room(context, error, [piece.sizes for piece in pieces], sent=False)

    def _microbatches(self, part: Range) -> Microbatches:
        """Return the fewest microbatches of compiled kernels. Compiles one if there are none for this number."""
        kernels = self._parts.engine.kernels
        found = cheapest(part.examples, list(kernels.compiled.ready[0]), lambda size: 1.0)
        if found is None:
            kernels.require_microbatches([(part.examples,)])
            found = (part.examples,)
        return found


def whole(sizes: Sequence[int]) -> tuple[Ranges, ...]:
    """Return the range of each worker's batch in the global batch."""
    starts = accumulate(sizes, initial=0)
    return tuple((Range(start, size),) if size else () for start, size in zip(starts, sizes, strict=False))


def divided(before: Sequence[Ranges], sizes: Sequence[int]) -> tuple[Ranges, ...] | None:
    """Return the ranges of the remaining workers: what they had, and then parts of what the lost ones had.

    Args:
      before: the ranges of all workers; length capacity.
      sizes: the batch sizes without the lost workers; shape=(capacity,).

    Returns:
      The ranges of each worker slot; `None` if a worker has fewer examples than before or had none, or if the global
      batch is another one.
    """
    had = [sum(part.examples for part in ranges) for ranges in before]
    if sum(had) != sum(sizes) or any(0 < new < old or (new and not old) for old, new in zip(had, sizes, strict=True)):
        return None
    lost = deque(part for ranges, size in zip(before, sizes, strict=True) if not size for part in ranges)
    found = []
    for ranges, old, new in zip(before, had, sizes, strict=True):
        taken, more = list(ranges) if new else [], new - old if new else 0
        while more:
            start, left = lost.popleft()
            examples = min(more, left)
            taken.append(Range(start, examples))
            more -= examples
            if left > examples:
                lost.appendleft(Range(start + examples, left - examples))
        found.append(tuple(taken))
    return tuple(found)
