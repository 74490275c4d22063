"""Recording of a timeline over some steps; rank 0 writes it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from adaptive.base.activity import Activity
from adaptive.base.exit_hooks import register_exit_hook
from adaptive.base.timeline import COMPILER, Timeline
from adaptive.base.world import World
from adaptive.observe.trace import OfProcess, write_trace
from adaptive.runtime.engine import Engine

_log = logging.getLogger("adaptive")


class Traced(NamedTuple):
    """The file and range of a trace. Replicated."""

    path: str
    until: int  # the last step; the file is written after it
    since: int  # the step before the first one


def check_writable(path: Path) -> None:
    """Check that a file can be written, before the steps are traced. Leaves no file.

    Raises:
      OSError: the file cannot be written.
    """
    there = path.exists()
    with open(path, "a"):
        pass
    if not there:
        path.unlink()


class TraceRecorder:
    """The trace that is being recorded, if any. Every process has one.

    Args:
      name: the program's name.
    """

    def __init__(self, world: World, name: str, engine: Engine, activity: Activity):
        self._world, self._name, self._engine, self._activity = world, name, engine, activity
        self._traced: Traced | None = None
        self._step = 0  # the last traced step
        self._forget: Callable[[], None] | None = None

    @property
    def traced(self) -> Traced | None:
        """The steps to trace. Replicated."""
        return self._traced

    @traced.setter
    def traced(self, traced: Traced | None) -> None:
        """Start a trace, continue one like the other processes, or, for `None`, end without writing."""
        if (traced is None) != (self._traced is None):
            timeline = None if traced is None else Timeline()
            self._engine.context.timeline = timeline
            self._activity.turned = None if timeline is None else timeline.turned
            if self._forget is not None:
                self._forget()
            self._forget = None if traced is None else register_exit_hook(self.close)
        self._traced = traced
        self._step = 0 if traced is None else traced.since

    def after(self, step: int) -> None:
        """Write the trace if this step was its last. All processes call it; may communicate."""
        self._step = step
        if self._traced is not None and step >= self._traced.until:
            self.end()

    def shift(self, steps: int) -> None:
        """Continue the trace after a restore has changed the numbers of steps by `steps`."""
        if self._traced is not None:
            since, until = self._traced.since + steps, self._traced.until + steps
            self._traced, self._step = self._traced._replace(since=since, until=until), self._step + steps

    def end(self) -> None:
        """Write the recorded steps. All processes call it; communicates."""
        traced, timeline, world = self._traced, self._engine.context.timeline, self._world
        if traced is None or timeline is None:
            return
        self.traced = None
        now = time.perf_counter()
        for (size, began), ended in list(self._engine.kernels.compiled.compile_times.items()):
            if ended > timeline.began:
                timeline.add(COMPILER, f"compile {size} examples", began, min(ended, now))
        own = OfProcess.of(timeline, self._who(), world.workers)
        about = f"the trace of {self._name} until step {traced.until}"
        gathered = world.all_gather_bytes(own.encode(), about) if world.processes > 1 else [own.encode()]
        if not world.rank:
            try:
                write_trace(Path(traced.path), [OfProcess.decode(sent) for sent in gathered])
            except OSError as error:
                _log.warning("the trace is not written: %s: %s", error.strerror or error, traced.path)

    def close(self) -> None:
        """Write the recorded steps if there is one process; else log that none are written. Does not communicate."""
        traced = self._traced
        if traced is None:
            return
        done, wanted = self._step - traced.since, traced.until - traced.since
        if done and self._world.processes == 1:
            self.end()
            return
        self.traced = None
        if not self._world.rank:
            why = (
                f"only {done} of {wanted} steps ran. Several processes write a trace together, after its last step or "
                "at the end of run(). Trace fewer steps"
                if done
                else f"no step ran after program.trace(), which traces the next {wanted} steps. Call it before the "
                "steps"
            )
            _log.warning("the trace is not written: %s: %s", traced.path, why)

    def _who(self) -> str:
        first, *others = self._world.workers
        return f"rank {self._world.rank}: " + (f"workers {first}–{others[-1]}" if others else f"worker {first}")
