"""The end of a general step: runs hooks and reports the step."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from adaptive.base.activity import COMPUTING, HOOKS, OTHER
from adaptive.base.decision import Decision
from adaptive.base.failure import report_failure
from adaptive.base.thread_status import thread_status
from adaptive.observe.events import Asked, StepEvent, hook_values
from adaptive.observe.report import Report
from adaptive.runtime.outcome import Outcome

from .parts import ProgramParts


def finish_step(p: ProgramParts, outcome: Outcome, notes: list[str]) -> Report:
    """Count a step, run the hooks, and report the step. May communicate.

    Args:
      p: the program's parts.
      notes: notes on the step so far.
    """
    run, sizes, stream, activity, kernels = p.run, p.sizes, p.stream, p.activity, p.engine.kernels
    activity.turn(OTHER)
    ran, limits, members = (sizes.current, sizes.previous), sizes.limits, sizes.members
    by_script, p.decisions.by_script = p.decisions.by_script, []
    joined, lost, come_and_gone = p.members.drain_events()
    run.step += 1
    epochs_before = stream.epoch
    stream.advance(ran[0])
    consumed = stream.consumed
    p.clock.record(outcome.compute_seconds, beside_compiler=kernels.step_ended())
    notes = [*come_and_gone, *notes]
    if run.checkpointer is not None:
        run.notes += run.checkpointer.drain_notes()
    notes, run.notes = [*run.notes, *notes], []
    sizes.step_done()
    epoch = stream.epochs
    asked, decision = Asked.so_far(sizes, p.membership) if p.listeners.any else None, None
    in_force = p.hyperparameters.values
    if outcome.committed:
        if run.step >= p.hooks.next_due:  # waiting for values does not count as time of the hooks
            with activity.doing(COMPUTING):
                jax.block_until_ready(outcome.hooks)
        activity.turn(HOOKS)
        decision, more = _decide(p, outcome, epoch, ran)
        activity.turn(OTHER)
        notes += more
    counters, metrics, breakdown = kernels.counters, _metrics(p, outcome), activity.end()
    report = Report(
        step=run.step,
        epoch=stream.epoch,
        examples=consumed,
        metrics=metrics,
        batch_sizes=ran[0],
        global_batch=sum(ran[0]),
        messages=outcome.messages,
        message_bytes=outcome.message_bytes,
        seconds=sum(breakdown),
        compute_seconds=tuple(outcome.compute_seconds),
        microbatches=tuple(outcome.microbatches),
        kernels=counters.kernels,
        compile_seconds=counters.compile_seconds,
        waited_seconds=counters.waited_seconds,
        decision=decision,
        skipped=not outcome.committed,
        notes=tuple(notes),
        members=members,
        joined=joined,
        lost=lost,
        breakdown=breakdown,
        epoch_ended=stream.epoch > epochs_before,
        hyperparameters=in_force,
    )
    if not p.world.rank:
        p.run_warnings.take(report, p.status.heard, p.clock.beside_compiler)
    if asked is not None:
        values = hook_values(p.hooks, outcome.hooks)
        decided, requests = p.decisions.last_asked if decision is not None else ((), ())
        details = limits, p.seed, values, asked, decided, p.status.seconds(breakdown.waiting), (*by_script, *requests)
        origin, run.origin = run.origin, None
        clock = time.time(), activity.between(), origin
        failed = p.listeners.notify(StepEvent(report, epoch, ran[1], *details, run.run_id, run.restored, *clock))
        report = replace(report, notes=(*report.notes, *failed)) if failed else report
    run.restored = False
    p.tracing.after(run.step)
    return report


@thread_status("in the hooks")
def _decide(
    p: ProgramParts, outcome: Outcome, epoch: float, ran: tuple[tuple[int, ...], tuple[int, ...]]
) -> tuple[Decision | None, list[str]]:
    step = p.run.step
    try:
        return p.decisions.after_step(step, epoch, outcome.hooks, ran)
    except Exception as error:
        error.add_note(f"after step {step}, on {p.workers_in_words}")
        report_failure(p.world, f"in the hooks after step {step} of {p.name}", error)
        raise


def _metrics(p: ProgramParts, outcome: Outcome) -> Any:
    """Return the metrics; NaN for a skipped step."""
    graph = p.plan.graph
    if outcome.committed:
        return graph.metrics_tree.unflatten(outcome.metrics)
    return jax.tree.unflatten(graph.metrics_tree, [np.full(a.aval.shape, np.nan) for a in graph.metrics])
