"""The loop of steady steps: no worker joins or leaves, no size changes, and no hook decides.

Nearly all steps of a run are steady. Data that consecutive steps share are prepared after a general step. Steady steps
check that they still hold, compute, and report. A test counts the Python calls of such a step
(tests/adaptive/runtime/test_steady_step.py); docs/cost.md gives its cost. Some loops here are not comprehensions,
because up to Python 3.11 a comprehension is a call.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from adaptive.base.activity import INPUT, OTHER
from adaptive.base.signals import PENDING_TERMINATION
from adaptive.base.world import MembersChanged
from adaptive.data.stream import Share
from adaptive.observe.report import Report, report_of
from adaptive.operators.sources import Reading
from adaptive.runtime.microbatches import Microbatches
from adaptive.runtime.out_of_memory import check_memory
from adaptive.runtime.outcome import Outcome
from adaptive.runtime.steady_step import SteadyStep

from .membership_changes import MembershipChanges
from .parts import ProgramParts


class SteadyLoop:
    """Runs the steps of a program in which nothing has changed since the previous step.

    Args:
      parts: the program's parts.
      membership_changes: changes of membership, applied before a general step.
    """

    def __init__(self, parts: ProgramParts, membership_changes: MembershipChanges):
        self._parts, self._membership_changes = parts, membership_changes
        self._on = False  # whether the next step can be steady, as of the last one
        self._share: Share | None = None  # of the next step, if its microbatches are dispatched ahead
        self._sizes: tuple[int, ...] = ()
        self._taking_part = np.zeros(0, bool)  # which workers have examples, for `_sizes`
        self._steady: SteadyStep | None = None  # runs the steps; `None`: the engine does

    def prepare(self) -> None:
        """Determine after a general step whether the next step can be steady, and prepare for it."""
        p = self._parts
        world, sizes = p.world, p.sizes
        self.stop()
        self._on = p.run.compiled and sizes.pending is None and self._membership_changes.settled
        if not self._on:
            return
        if self._sizes != sizes.current:  # the same array while sizes stay: `SteadyStep` compares by identity
            self._taking_part = np.asarray(sizes.current) > 0
        self._sizes, self._asked = sizes.current, p.membership.asked
        self._steady = steady = p.engine.steady_step(self._sizes)
        p.stream.fetched = steady.copied.copy if steady is not None and steady.runs_ahead else None
        self._generation, self._run_under_way = world.generation, world.run_under_way
        self._workers = tuple(world.workers)
        self._size, self._total = self._sizes[self._workers[0]], sum(self._sizes)
        self._min_microbatches = p.engine.min_microbatches_of(self._size, self._total)
        self._epoch = p.stream.epoch
        self._said: tuple[Any, ...] = ()
        self._in_force = p.hyperparameters.values
        self._more = p.decisions.last
        self._search = p.skipped.next_raises
        self._same = {  # the same in all reports
            "batch_sizes": self._sizes,
            "global_batch": self._total,
            "decision": None,
            "skipped": False,
            "notes": (),
            "members": sizes.members,
            "joined": (),
            "lost": (),
        }

    def stop(self) -> None:
        """Make the next step a general one."""
        self._on, self._share, self._parts.stream.fetched = False, None, None
        if self._steady is not None:
            self._steady.forget_ahead()

    def holds(self) -> bool:
        """Return whether the next step is steady."""
        if not self._on:
            return False
        p = self._parts
        world, sizes = p.world, p.sizes
        if (
            sizes.current is not self._sizes
            or sizes.pending is not None
            or world.generation != self._generation
            or world.run_under_way != self._run_under_way
            or p.membership.asked != self._asked
            or PENDING_TERMINATION
            or p.engine.context.timeline is not None
            or p.membership.leave_requested
        ):
            self.stop()
        return self._on

    def step(self, began: float, since: float) -> Outcome | None:
        """Run a step: compute, exchange, and commit.

        Args:
          began: the start of the step, by `time.perf_counter`.
          since: seconds since the start of the previous step.

        Returns:
          The outcome; `None` if members were lost in the step.
        """
        p = self._parts
        engine, status = p.engine, p.status
        kernels, steady, size = engine.kernels, self._steady, self._size
        if steady is None:
            return self._through_engine(since)
        choice = kernels.choices[0]
        if choice.steps and choice.size == size and choice.at_least == self._min_microbatches:
            choice.steps -= 1
        else:
            choice = kernels.choose(0, size, self._min_microbatches)
        if not steady.fits(choice):
            choice.steps += 1  # undo, because the engine counts the step again
            self._share = None  # the engine repeats the work that was dispatched ahead
            steady.forget_ahead()
            return self._through_engine(since)
        p.activity.now, p.activity.waited_before, asked = INPUT, p.world.waited, time.perf_counter()
        share, self._share = self._share or p.stream.take(self._sizes), None
        input_seconds = time.perf_counter() - asked
        self._say(p)
        reading = self._reading(0, share.offsets[0], since)
        try:
            return steady(
                *(share, reading, choice, p.stream.prefetch, self._search, self._more),
                *(began, input_seconds),
            )
        except MembersChanged:
            self._give_up_step(began, input_seconds)
            return None
        except jax.errors.JaxRuntimeError as error:
            self._give_up_step(began, input_seconds)
            check_memory(engine.context, error, [choice.microbatches])
            raise
        finally:
            status.repeats = False

    def _give_up_step(self, began: float, input_seconds: float) -> None:
        self.stop()
        self._parts.activity.took(began, (input_seconds, 0.0, 0.0), time.perf_counter())

    def _say(self, p: ProgramParts) -> None:
        """Let the status repeat this process's previous report, if no fact has changed."""
        kernels, status = p.engine.kernels, p.status
        says = (
            p.digest.value,
            status.checkpoint_due,
            p.world.processes,
            kernels.compiled.complete,
            self._run_under_way and p.membership.leave_request,  # also of processes in reserve
        )
        status.repeats = says == self._said
        if not status.repeats:
            self._said, self._more, self._in_force = says, p.decisions.last, p.hyperparameters.values

    def _through_engine(self, since: float) -> Outcome | None:
        """Run a step by the engine: for several workers in this process, or several levels."""
        p = self._parts
        activity, readings = p.activity, []
        activity.begin()
        activity.turn(INPUT)
        share = p.stream.take(self._sizes)
        activity.turn(OTHER)
        self._say(p)
        for place, offset in enumerate(share.offsets):
            readings.append(self._reading(place, offset, since))
        try:
            return p.engine.step(share, readings, p.stream.prefetch, search=p.skipped.next_raises, more=self._more)
        except MembersChanged:
            self.stop()
            return None
        finally:
            p.status.repeats = False

    def _reading(self, place: int, offset: int, since: float) -> Reading:
        p, worker = self._parts, self._workers[place]
        size, seconds = self._sizes[worker], p.clock.compute_seconds[place]
        # Skips the Python initializer.
        values = p.run.step, p.seed, worker, self._total, size, size, 1, offset, seconds, since, self._taking_part
        return tuple.__new__(Reading, values)

    def is_plain(self, outcome: Outcome) -> bool:
        """Return whether a step needs only a plain report, which `report` can create."""
        p = self._parts
        return (
            outcome.trouble is None
            and p.run.step + 1 < p.hooks.next_due
            and p.run.checkpointer is None
            and not p.run.notes
            and not p.decisions.by_script
            and not p.listeners.any
        )

    def report(self, outcome: Outcome) -> Report:
        """Count a step, and report it."""
        p = self._parts
        engine, stream, sizes, clock = p.engine, p.stream, p.sizes, p.clock
        kernels, steady, world = engine.kernels, self._steady, p.world
        p.run.step += 1
        p.run.restored = False
        if p.skipped.in_a_row:
            p.skipped.in_a_row = 0
            self._search = p.skipped.next_raises
        stream.advance(self._sizes)
        if kernels.busy:
            clock.record(outcome.compute_seconds, beside_compiler=kernels.step_ended())
        else:
            clock.compute_seconds, clock.beside_compiler = outcome.compute_seconds, 0
        ran = self._sizes, sizes.previous
        sizes.step_done()
        if steady is not None and steady.runs_ahead:
            self._run_ahead(outcome.microbatches[0])
        examples, ended = sum(stream.cursors), self._epoch
        self._epoch = epoch = examples // stream.length if stream.length else stream.epoch
        if p.hooks.watches:
            p.hooks.note(p.run.step, stream.epochs, outcome.hooks, ran, sizes.members)
        counters, breakdown = kernels.counters, p.activity.end()
        report = report_of(
            {
                **self._same,
                "step": p.run.step,
                "epoch": epoch,
                "examples": examples,
                "metrics": p.plan.graph.metrics_tree.unflatten(outcome.metrics),
                "messages": outcome.messages,
                "message_bytes": outcome.message_bytes,
                "seconds": sum(breakdown),
                "breakdown": breakdown,
                "compute_seconds": tuple(outcome.compute_seconds),
                "microbatches": tuple(outcome.microbatches),
                "kernels": counters.kernels,
                "compile_seconds": counters.compile_seconds,
                "waited_seconds": counters.waited_seconds,
                "epoch_ended": epoch > ended,
                "hyperparameters": dict(self._in_force),
            }
        )
        if not world.rank:
            p.run_warnings.take(report, p.status.heard, clock.beside_compiler)
        return report

    def _run_ahead(self, microbatches: Microbatches) -> None:
        """Dispatch the next step's kernels, if that step will be steady too."""
        p = self._parts
        epoch, step = p.run.limit
        last = (step is not None and p.run.step >= step) or (epoch is not None and p.stream.epoch >= epoch)
        if last or p.sizes.pending is not None or self._steady is None:
            return
        self._share = share = p.stream.take(self._sizes)
        reading = self._reading(0, share.offsets[0], float("nan"))
        self._steady.dispatch_ahead(share, reading, microbatches)
