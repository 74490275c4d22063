"""The host step: kernels, messages, the check for NaNs and the update, with the host between them.

It executes the schedule (`schedule.py`), which is built again when the revision changes. A step commits completely or
not at all: the final operations, which reuse the memory of the old state, start after all messages have arrived and are
finite. Short steps spend most of their time in Python, so the loops here call what the schedule has prepared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from operator import getitem
from typing import Any

import jax
import jax.numpy as jnp

from adaptive.base.activity import COMPUTING, EXCHANGING
from adaptive.data.stream import Share
from adaptive.operators.sources import Reading

from .kernels.memory_bound import check_update
from .kernels.microbatches import OWN_KERNEL_AFTER, Microbatches
from .nan_origin import find_trouble
from .schedule import Schedule, Sent, Stage
from .step_context import Outcome, Prefetch, StepContext

_NAN = float("nan")


class HostStep:
    """Takes steps on this process's workers."""

    def __init__(self, ctx: StepContext):
        self._ctx = ctx
        self._key: tuple[Any, ...] = ()  # what the schedule depends on: revision, sizes, microbatches if given, seed
        self._schedule: Schedule | None = None
        self._stayed = 0  # steps at these sizes
        self._nbytes = [layout.nbytes for layout in ctx.layouts]

    @property
    def microbatches(self) -> list[Microbatches]:
        """The microbatches of the last step, by local index."""
        return [] if self._schedule is None else self._schedule.microbatches

    # --- the schedule -------------------------------------------------------------------------------------------------

    def _build(self, share: Share, readings: Sequence[Reading], given: Sequence[Microbatches] | None) -> Schedule:
        """Build the schedule for a step."""
        ctx = self._ctx
        if given is None:
            at_least = self._at_least(readings)
            given = [ctx.kernels.choose(i, r.batch_size, at_least[i]) for i, r in enumerate(readings)]
        self._schedule = None  # frees what it holds
        jax.block_until_ready(ctx.workers.committed)
        return Schedule(ctx, given, readings, share.batches)

    def _at_least(self, readings: Sequence[Reading]) -> list[int]:
        return [self._ctx.min_microbatches_of(r.batch_size, r.global_batch) for r in readings]

    # --- a step -------------------------------------------------------------------------------------------------------

    def __call__(
        self,
        share: Share,
        readings: Sequence[Reading],
        prefetch: Prefetch,
        microbatches: Sequence[Microbatches] | None,
        search: bool,
        more: str,
    ) -> Outcome:
        """Compute, exchange, and commit: see `Engine.step`."""
        ctx, schedule = self._ctx, self._schedule
        if ctx.workers.held_by is not None:
            ctx.workers.fetch()
        key = (ctx.workers.revision.number, share.sizes, microbatches, readings[0].seed)
        if schedule is None or key != self._key:
            self._stayed = self._stayed if key[1:] == self._key[1:] else 0
            self._key, schedule = key, self._build(share, readings, microbatches)
            self._schedule = schedule
        self._stayed += 1
        if self._stayed == OWN_KERNEL_AFTER and microbatches is None:
            for i, at_least in enumerate(self._at_least(readings)):
                ctx.kernels.ask_for_own(i, readings[i].batch_size, at_least)
        seconds, sent, failed = list(schedule.seconds), list[int](), None
        try:
            schedule.begin(readings, share.batches)
            for level in schedule.levels:
                if level.operations or level is schedule.levels[0]:
                    self._compute(level, seconds, prefetch if level is schedule.levels[0] else None, share.sizes)
                if level.messages:
                    failed = self._exchange(schedule, level, seconds, sent, readings[0].step + 1, more)
                    if failed is not None:
                        break
            # All processes come to the same message that is not finite.
            trouble = failed and find_trouble(ctx, schedule, failed, share, readings, search=search)
            if not trouble:
                ctx.interrupts.hold()
            results = [] if trouble else self._commit(schedule)
        finally:
            for place in schedule.frees:
                place.values[place.places] = place.nothing
        if failed is not None and ctx.plan.messages[failed.number].level < ctx.plan.levels - 1:
            seconds = [_NAN] * len(seconds)  # of a part of the step
        nbytes = sum(map(self._nbytes.__getitem__, sent))
        return Outcome(ctx.shown, results, seconds, schedule.microbatches, len(sent), nbytes, trouble)

    def _compute(self, level: Stage, seconds: list[float], prefetch: Prefetch | None, sizes: tuple[int, ...]) -> None:
        """Dispatch the operations of a level, and wait for the parts of its messages. Adds to `seconds`."""
        waiters, started = self._ctx.waiters, time.perf_counter()
        for run, values, arguments, results, frees in level.operations:
            values[results] = run(*arguments(values))
            if frees is not None:
                values[frees.places] = frees.nothing
        if prefetch is not None:
            prefetch(sizes)
        if waiters is None:
            for i, (values, place) in enumerate(level.waits):
                values[place].block_until_ready()
                seconds[i] += time.perf_counter() - started
            return
        # One thread cannot tell when each of several devices was ready.
        for i, ended in enumerate(waiters.map(_ready_at, level.waits)):
            seconds[i] += ended - started

    def _exchange(
        self, schedule: Schedule, level: Stage, seconds: list[float], sent: list[int], step: int, more: str
    ) -> Sent | None:
        """Exchange the messages of a level, and add their numbers to `sent`. Return one that is not finite, if any."""
        ctx, arrived, activity = self._ctx, [], self._ctx.activity
        # The previous step's update must have finished reading the receive buffers before they are overwritten.
        for array in ctx.workers.committed:
            array.block_until_ready()
        activity.now = EXCHANGING
        activity.marks.append((EXCHANGING, time.perf_counter(), ctx.world.waited))
        for message in level.messages:
            number, out, travels, gate, parts, arrives = message
            rows: Sequence[Sequence[Any]] = list(map(getitem, *parts))
            if not travels or not (gate is None or bool(gate[0][gate[1]])):
                for values, places, row in zip(*arrives, rows, strict=True):
                    values[places] = row
                continue
            if number == ctx.status_message:
                ctx.status.own_seconds = activity.of_workers(seconds)
                out.status = ctx.status.encode().astype(out.status.dtype)
            sent.append(number)
            out.parts, out.about = rows, f"message {number + 1} of step {step} of {ctx.name}"
            out.more, out.step = more, step
            arrived.append((message, *ctx.channels[number].exchange(out)))
            out.parts = ()
        del rows
        activity.now = COMPUTING
        activity.marks.append((COMPUTING, time.perf_counter(), ctx.world.waited))
        for message, results, status in arrived:
            if message.number == ctx.status_message:
                ctx.status.decode(status)
            for values, places, row in zip(*message.arrives, results, strict=True):
                values[places] = row
            if ctx.finite_checks and not ctx.finite_checks[message.number].passes(results[0]):
                return message
        for place in level.frees:  # memory as large as the gradient, for the next level or the update
            place.values[place.places] = place.nothing
        return None

    def _commit(self, schedule: Schedule) -> list[Any]:
        """Run the final operations, whose results become the workers' state. Returns those of the first worker."""
        workers, found = self._ctx.workers, []
        for (run, values, arguments, _, _), keeps in schedule.commits:
            kept = list(map(jnp.copy, map(values.__getitem__, keeps))) if keeps else keeps
            try:
                found.append((run(*arguments(values)), kept))
            except jax.errors.JaxRuntimeError as error:
                check_update(error)
                raise
        workers.committed = []
        for (operation, keeps), (results, kept) in zip(schedule.commits, found, strict=True):
            workers.committed += results[:1]
            operation.values[operation.results] = results[operation.results]
            for place, value in zip(keeps, kept, strict=True):
                operation.values[place] = value
        return found[0][0]


def _ready_at(place: tuple[list[Any], int]) -> float:
    values, at = place
    values[at].block_until_ready()
    return time.perf_counter()
