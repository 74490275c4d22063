"""The outputs that one call of `Program.run` opens and closes: progress display, logs, and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from adaptive.observe.sinks import Sink, SinkThread, checked

from .parts import ProgramParts

# Imported on use, because imports dominate the start-up time, and not every run needs these.
if TYPE_CHECKING:
    from .checkpoints import Checkpoints
    from .run_checkpointer import RunCheckpointer


@contextmanager
def shown(parts: ProgramParts) -> Iterator[None]:
    """Show the run's progress on rank 0, for the duration of the block."""
    from adaptive.observe.progress import Course, Progress

    p, batch_sizes = parts, parts.sizes.current
    missing = 0 if p.run.compiled else p.engine.missing([batch_sizes[worker] for worker in p.world.workers])
    course = Course(p.plan.graph.name, batch_sizes, len(p.data), *p.run.limit, missing)
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
    """Write each step to sinks, for the duration of the block.

    Args:
      log, record: see `Program.run`.
    """
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
    """Open a directory of checkpoints, for the duration of the block. Communicates.

    Yields:
      The object that saves the checkpoints.
    """
    from .run_checkpointer import RunCheckpointer

    with closing(RunCheckpointer(options, parts)) as checkpointer:
        parts.run.checkpointer = checkpointer
        try:
            yield checkpointer
        finally:
            parts.run.checkpointer = None
            checkpointer.wait()
            parts.run.notes += checkpointer.drain_notes()
