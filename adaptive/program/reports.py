"""The end of a step: counts it, runs the hooks that are due, checks and reports it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import numpy as np

from adaptive.base.activity import COMPUTING, HOOKS, OTHER
from adaptive.base.decision import Decision
from adaptive.base.process.failure import report_failure
from adaptive.base.process.thread_status import thread_status
from adaptive.base.world import Loss
from adaptive.control.hooks import TakenStep
from adaptive.observe.events import Asked, StepEvent, hook_values
from adaptive.observe.report import Report, report_of
from adaptive.runtime.finite import Trouble, not_finite
from adaptive.runtime.step_context import Outcome

from .arguments import NonFinite

if TYPE_CHECKING:
    from .members import Members
    from .parts import ProgramParts


MOST_SKIPPED = 25  # steps in a row; one more raises
_NAN = float("nan")


class SkippedSteps:
    """Counter of consecutive steps that are skipped because a reduced value is not finite. Replicated.

    Attributes:
      checks: whether values that are not finite prevent a commit, and NaNs in the state a checkpoint.
      raises: whether such a step raises an error.
      in_a_row: steps that were skipped since the last one that was committed.
    """

    TRANSFERRED = ("in_a_row",)  # what a joining process takes over from the others

    def __init__(self, nonfinite: NonFinite):
        self.checks, self.raises = nonfinite != "allow", nonfinite == "raise"
        self.in_a_row = 0

    def check(self, trouble: Trouble | None, step: int) -> list[str]:
        """Return notes on why a step is skipped; none for a committed step. Raises a NonFiniteError if the step
        is not finite and must not be skipped.
        """
        if trouble is None:
            self.in_a_row = 0
            return []
        if self.raises:
            raise not_finite(trouble, step)
        if self.in_a_row == MOST_SKIPPED:
            raise not_finite(trouble, step, MOST_SKIPPED)
        self.in_a_row += 1
        return [f"skipped: {cause}" for cause in trouble.causes]


class Reports:
    """Ends the steps of one program. Calls only what a step needs: most have no due hook, no listener, and no notes.

    Attributes:
      members_changed: whether workers may have come or gone since the last report.
      in_force: the hyperparameters of the next step.
      epoch: whole epochs of data consumed.
    """

    def __init__(self, parts: ProgramParts, members: Members):
        self._parts, self._members = parts, members
        self.members_changed = True
        self.in_force = parts.hyperparameters.values
        self.epoch = parts.stream.epoch
        self._asked: tuple[tuple[int, int], Asked] | None = None  # the targets, and what they are valid for

    def finish(self, outcome: Outcome, notes: list[str]) -> Report:
        """Count a step, run the hooks, and report the step. `notes`: on the step so far. May communicate."""
        p = self._parts
        run, sizes, stream, kernels = p.run, p.sizes, p.stream, p.engine.kernels
        p.activity.now = OTHER
        p.activity.marks.append((OTHER, time.perf_counter(), p.world.waited))
        ran, limits, members, listens = (sizes.current, sizes.previous), sizes.limits, sizes.members, p.listeners.any
        by_script, p.decisions.by_script = p.decisions.by_script, []
        run.step += 1
        stream.advance(ran[0])
        beside_compiler = kernels.busy and kernels.step_ended()  # then they do not measure the machine's speed
        run.compute_seconds = [_NAN] * len(outcome.compute_seconds) if beside_compiler else outcome.compute_seconds
        joined, lost = tuple[int, ...](), tuple[Loss, ...]()
        if self.members_changed:
            self.members_changed = False
            joined, lost, come_and_gone = self._members.drain_events()
            notes = [*come_and_gone, *notes]
        if run.notes:
            waiting, run.notes = run.notes, []  # a checkpoint that is being written may add one at any time
            notes = [*waiting, *notes]
        if sizes.pending is not None or ran[0] is not ran[1]:
            sizes.step_done()
        examples, ended = sum(stream.cursors), self.epoch
        self.epoch = epoch = examples // stream.length if stream.length else stream.epoch
        if p.engine.context.interrupts.held:
            p.engine.context.interrupts.release()
        asked = self._targets() if listens else None
        decision, committed = None, outcome.trouble is None
        if committed and (p.hooks.watches or run.step >= p.hooks.next_due):
            taken = TakenStep(run.step, stream.epochs, ran, sizes.members, examples)
            decision, more = self._hooks(taken, outcome)
            notes = [*notes, *more]
        graph, counters, breakdown = p.plan.graph, kernels.compiled.counters, p.activity.end()
        unknown = () if committed else [np.full(a.aval.shape, np.nan) for a in graph.metrics]
        report = report_of(
            {
                "step": run.step,
                "epoch": epoch,
                "examples": examples,
                "metrics": graph.metrics_tree.unflatten(outcome.results[outcome.shown[1]] if committed else unknown),
                "batch_sizes": ran[0],
                "global_batch": sum(ran[0]),
                "messages": outcome.messages,
                "message_bytes": outcome.message_bytes,
                "seconds": sum(breakdown),
                "breakdown": breakdown,
                "compute_seconds": tuple(outcome.compute_seconds),
                "microbatches": tuple(outcome.microbatches),
                "kernels": counters.kernels,
                "compile_seconds": counters.compile_seconds,
                "waited_seconds": counters.waited_seconds,
                "decision": decision,
                "skipped": not committed,
                "notes": tuple(notes),
                "members": members,
                "joined": joined,
                "lost": lost,
                "epoch_ended": epoch > ended,
                "hyperparameters": dict(self.in_force),
            }
        )
        if asked is not None:
            decided, requests = p.decisions.last_asked if decision is not None else ((), ())
            values = hook_values(p.hooks, outcome.hooks if committed else [])
            seconds = p.status.seconds(breakdown.waiting)
            details = limits, p.seed, values, asked, decided, seconds, (*by_script, *requests)
            origin, run.origin = run.origin, None
            at = time.time(), p.activity.between(), origin
            event = StepEvent(report, p.stream.epochs, ran[1], *details, run.run_id, run.restored, *at)
            failed = p.listeners.notify(event)
            report = replace(report, notes=(*report.notes, *failed)) if failed else report
        run.restored = False
        return report

    def _targets(self) -> Asked:
        """Return the current targets; computed again when they may have changed."""
        p = self._parts
        known_for = p.revision.number, p.world.generation
        if self._asked is None or known_for != self._asked[0]:
            self._asked = known_for, Asked.so_far(p.sizes, p.membership)
        return self._asked[1]

    def _hooks(self, taken: TakenStep, outcome: Outcome) -> tuple[Decision | None, list[str]]:
        """Run the hooks that are due; those that observe every step keep this one."""
        p = self._parts
        if taken.step < p.hooks.next_due:
            p.hooks.note(taken, outcome.hooks)
            return None, []
        with p.activity.doing(COMPUTING):  # waiting for values does not count as time of the hooks
            jax.block_until_ready(outcome.hooks)
        with p.activity.doing(HOOKS):
            return self._decide(taken, outcome)

    @thread_status("in the hooks")
    def _decide(self, taken: TakenStep, outcome: Outcome) -> tuple[Decision | None, list[str]]:
        p, step = self._parts, taken.step
        try:
            return p.decisions.after_step(taken, outcome.hooks)
        except Exception as error:
            error.add_note(f"after step {step}, on {p.world.workers_in_words}")
            report_failure(p.world, f"in the hooks after step {step} of {p.name}", error)
            raise
