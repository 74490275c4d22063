"""One call of `Program.run`: its steps, its outputs, and how it ends on all processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from adaptive.base.errors import DriverError, Preempted
from adaptive.base.process.signals import SignalHandlers, acknowledge_termination
from adaptive.observe.report import Report
from adaptive.observe.sinks import Sink, SinkThread, checked

from .arguments import count, flag
from .members import AllLeave, RunOver
from .parts import ProgramParts, RunLimit
from .run_loop import RunLoop

# Imported on use, because imports dominate the start-up time, and not every run needs these.
if TYPE_CHECKING:
    from .checkpoints import Checkpoints
    from .run_checkpointer import RunCheckpointer

_log = logging.getLogger("adaptive")


def steps_of_run(
    parts: ProgramParts,
    loop: RunLoop,
    limits: Mapping[str, int | None],
    progress: bool,
    log: Sequence[Sink],
    record: str | Path | None,
    checkpoint: Checkpoints | None,
) -> Iterator[Report]:
    """Run steps, and yield a report of each. Arguments and errors are those of `Program.run`: a DriverError if an
    argument is invalid, and KeyboardInterrupt.
    """
    p, run = parts, parts.run
    loop.settle()
    has_settings = p.ambient.matches_here()  # not asked in every step, since that takes longer than all else there
    progress = flag("progress", progress)
    if record is not None and not isinstance(record, str | os.PathLike):
        raise DriverError(f'record= is the path of a file, such as "run.jsonl"; got {record!r}.')
    last_epoch = _limit(limits, "epochs", "until_epoch", p.stream.epoch)
    last_step = _limit(limits, "steps", "until_step", run.step)
    if last_epoch is not None:
        p.stream.check_epochs("steps=…")
    run.limit = RunLimit(last_epoch, last_step)
    p.decisions.stopped = False
    with ExitStack() as stack:
        run.under_way = True
        stack.callback(setattr, run, "under_way", False)
        if checkpoint is not None:
            stack.enter_context(SignalHandlers())
        if progress:
            stack.enter_context(shown(p))
        stack.enter_context(logged(p, log, record))
        checkpointer = None if checkpoint is None else stack.enter_context(checkpointed(p, checkpoint))
        all_leave: AllLeave | None = None
        while True:
            if _is_over(p) or all_leave:
                if loop.settle():
                    break
                p.decisions.stopped = False  # on values of a step that is taken again
                continue
            try:
                report = loop.step(wait=False, has_settings=has_settings)
            except KeyboardInterrupt:
                raise KeyboardInterrupt from None  # without the frames of a step
            except RunOver:  # this process was in reserve until the run ended
                return
            except AllLeave as why:
                all_leave = why
                continue
            if checkpointer is not None and checkpointer.is_due(report) and loop.settle():
                checkpointer.save(is_last=_is_over(p))
            limit = run.limit
            yield report
            if run.limit is not limit:
                raise DriverError(
                    f"another run() of {p.name} has begun in the loop over this one, which ends it. In the body, take "
                    "steps by  program.step()"
                )
        if p.world.processes > 1 and p.engine.has_status and (p.plan.hooks or p.decisions.stopped):
            # No step follows whose message would have the last decision.
            p.engine.exchange_status(f"the end of run() after step {run.step} of {p.name}", p.decisions.last)
        if checkpointer is not None and (checkpointer.has_stepped or all_leave is not None):
            checkpointer.save_and_wait()
        if all_leave is not None:
            unsaved = ", and saves no checkpoint, because run() has no checkpoint= with a directory"
            raise preempted(p, all_leave, "" if checkpointer else unsaved)
        p.world.end_run()
        loop.members.transfer_state()


def _is_over(parts: ProgramParts) -> bool:
    """Return whether the run has reached its limit, or has been stopped. Replicated."""
    # Read after every step, because a process that joins takes the limit over from the others.
    limit, p = parts.run.limit, parts
    done = limit.step is not None and p.run.step >= limit.step
    return done or (limit.epoch is not None and p.stream.epoch >= limit.epoch) or p.decisions.stopped


def _limit(limits: Mapping[str, int | None], name: str, name_of_total: str, done: int) -> int | None:
    """Return the number of epochs or steps at which a run ends, given as further ones or as a total."""
    further, total = limits[name], limits[name_of_total]
    if further is not None and total is not None:
        raise DriverError(
            f"run() takes {name}= or {name_of_total}=, not both: {name}= counts from now on, {name_of_total}= from the "
            "beginning of the training."
        )
    if total is not None:
        return count(name_of_total, total, least=0)
    return None if further is None else done + count(name, further, least=0)


def preempted(parts: ProgramParts, cause: AllLeave, more: str = "") -> Preempted:
    """Return the error that ends all processes, after all have written their logs and checkpoints. Communicates."""
    parts.world.barrier()
    acknowledge_termination()
    why = f"{cause}: {parts.name} ends after step {parts.run.step}{more}."
    if not parts.world.rank:
        _log.warning("%s", why)
    return Preempted(why)


@contextmanager
def shown(parts: ProgramParts) -> Iterator[None]:
    """Show the run's progress on rank 0, for the duration of the block."""
    from adaptive.observe.progress import Course, Progress

    p = parts
    course = Course(p.plan.graph.name, p.sizes.current, p.stream.epoch_length, *p.run.limit, not p.run.compiled)
    progress = Progress(course, p.world, p.activity, p.engine.kernels)
    p.run.progress = progress
    with p.listeners.add(progress):
        try:
            yield
        except BaseException as error:
            progress.close(error)
            raise
        progress.close()


@contextmanager
def logged(parts: ProgramParts, log: Sequence[Sink], record: str | Path | None) -> Iterator[None]:
    """Write each step to sinks, for the duration of the block."""
    from adaptive.observe.record import JSONL

    sinks = [*([] if record is None else [JSONL(record)]), *checked(log)]
    if not sinks:
        yield
        return
    with closing(SinkThread(sinks, parts.world)) as thread, parts.listeners.add(thread):
        parts.run.sinks = thread
        thread.log(parts.run.logged, step=0)
        parts.run.logged = {}
        yield


@contextmanager
def checkpointed(parts: ProgramParts, options: Checkpoints) -> Iterator[RunCheckpointer]:
    """Open a directory of checkpoints, for the duration of the block. Communicates."""
    from .run_checkpointer import RunCheckpointer

    with closing(RunCheckpointer(options, parts)) as checkpointer:
        parts.run.checkpointer = checkpointer
        try:
            yield checkpointer
        finally:
            parts.run.checkpointer = None
