"""Sinks, which write the steps of a run, and the thread that passes events to them.

A sink is slow compared with a step: encoding a line of JSON takes as long as a small kernel, a network service takes
seconds. The step only appends its event to a queue. Ten times a second the thread writes what is in the queue, after it
has waited for values of the device. To wake it for each step would take two to three times the processor time.

A sink that fails is disabled, and the run continues.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Protocol

from adaptive.base.errors import DriverError
from adaptive.base.process.exit_hooks import register_exit_hook
from adaptive.base.values.ambient import without_debug_checks
from adaptive.base.world import World

from .events import StepEvent
from .scalars import scalars

_INTERVAL = 0.1  # seconds between two batches of writes
_MOST_WAITING = 4096  # queued steps; while the sinks are further behind, steps are omitted
_SECONDS_TO_END = 10.0  # to wait for a write that is under way
_REMEMBERED = 256  # last steps that other ranks keep, in case rank 0 is lost before it writes them

_log = logging.getLogger("adaptive")


class Sink(Protocol):
    """A destination for the steps of a run, for `program.run(log=[…])`: an object with these methods.

        class Prints:
            def write(self, event):
                print(event.report.step, event.scalars["loss"])

            def close(self):
                pass

    The methods are called on rank 0, from one thread of all sinks. A third one is optional: `flush()` is called after
    some steps are written, and before a checkpoint is stored: the checkpoint of a step is on the disk only after the
    logs hold that step.

    A step may be written several times, and the last one counts: after a restore (`event.restored` is set in the first
    step), with the values of `program.log` (`event.logged`), and by a process that becomes rank 0, because the one
    before may not have written it. `event.run_id` identifies the run.
    """

    def write(self, event: StepEvent) -> Any:
        """Write a step. Must not communicate with other processes."""
        ...

    def close(self) -> Any:
        """End a run, also after an error. Another run may write to the same sink."""
        ...


def checked(log: Any) -> list[Sink]:
    """Return the argument `log=` as a list of sinks.

    Raises:
      DriverError: an entry is not a sink.
    """
    found = [log] if hasattr(log, "write") or isinstance(log, str) or not isinstance(log, Iterable) else list(log)
    for sink in found:
        methods = (getattr(sink, name, None) for name in ("write", "close"))
        if isinstance(sink, type) or not all(map(callable, methods)):
            raise DriverError(
                f"log= takes sinks, which have write(event) and close(); got {sink!r}. For example:\n"
                '    program.run(epochs=10, log=[ad.log.TensorBoard("runs/a"), ad.log.CSV("run.csv")])'
            )
    return found


class SinkThread:
    """A listener that passes events to sinks, in one thread, while this process has rank 0.

    A process of another rank keeps the last events, in case it becomes rank 0. The thread is no executor, whose threads
    Python joins at exit: a sink that hangs would keep the process alive.
    """

    reads_later = True  # see `Listeners`

    def __init__(self, sinks: Sequence[Sink], world: World):
        self._sinks, self._world = list(sinks), world
        self._failed: list[Sink] = []
        self._queue: SimpleQueue[StepEvent | threading.Event | None] = SimpleQueue()
        self._remembered: deque[StepEvent] = deque(maxlen=_REMEMBERED)
        self._last: StepEvent | None = None
        self._later: dict[str, float] = {}  # values that were logged before the first step
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._behind = self._closed = False
        self._pid = os.getpid()
        self._forget = register_exit_hook(self.close)

    def __call__(self, event: StepEvent) -> None:
        if self._later:
            event, self._later = replace(event, logged=self._later), {}
        self._last = event
        if self._world.rank:
            if event.restored:  # the steps so far are not those of the run any more
                self._remembered.clear()
                event = replace(event, restored=False)  # the rank 0 of that time has written it
            self._remembered.append(event)
            return
        while self._remembered:
            self._put(self._remembered.popleft())
        self._put(event)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write a step once more, with further values; also after the run. Before its first step, with that one.

        Raises:
          DriverError: a name is one of the step's own scalars.
        """
        last = self._last
        if last is None or last.report.step != step:
            self._later |= values
            return
        for name in values:
            if name not in last.logged and name in scalars(last):
                raise DriverError(f"{name!r} is a value of the step itself. Log it by another name:  log(val=…)")
        self._last = again = replace(last, restored=False, logged={**last.logged, **values})
        if self._closed:
            with closing(SinkThread(self._sinks, self._world)) as thread:
                thread(again)
        elif self._world.rank:
            self._remembered[-1] = again
        else:
            self._put(again)

    def _put(self, event: StepEvent) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="adaptive-log", daemon=True)
            self._thread.start()
        if self._queue.qsize() < _MOST_WAITING:
            self._queue.put(event)
        elif not self._behind:
            self._behind = True
            _log.warning("the sinks of log= cannot keep up: steps are omitted from step %s on.", event.report.step)

    def flush(self) -> None:
        """Write all queued steps; waits at most some seconds for a sink that hangs."""
        if self._thread is not None and not self._closed:
            written = threading.Event()
            self._queue.put(written)
            self._wake.set()
            if not written.wait(_SECONDS_TO_END):
                self._hangs()

    def close(self) -> None:
        """Write the queued steps, and close the sinks. Does nothing in a forked child: the parent writes them."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._forget()
        self._queue.put(None)
        self._wake.set()
        if self._thread is None:
            self._run()
            return
        self._thread.join(_SECONDS_TO_END)  # no thread may be running when the interpreter exits
        if self._thread.is_alive():
            self._hangs()

    def _run(self) -> None:
        while self._write():
            self._wake.wait(_INTERVAL)
            self._wake.clear()
        for sink in self._sinks:
            self._call(sink, sink.close)

    @without_debug_checks
    def _write(self) -> bool:
        """Write what is in the queue. Returns whether there will be more."""
        written: list[threading.Event] = []
        while not self._queue.empty():
            item = self._queue.get()
            if item is None:
                return False
            if isinstance(item, threading.Event):
                written.append(item)
            else:
                for sink in self._sinks:
                    self._call(sink, sink.write, item)
        for sink in self._sinks:
            if hasattr(sink, "flush"):
                self._call(sink, sink.flush)
        for event in written:
            event.set()
        return True

    def _call(self, sink: Sink, method: Any, *arguments: Any) -> None:
        if sink in self._failed and method != sink.close:
            return
        try:
            method(*arguments)
        except Exception as error:
            if sink not in self._failed:
                _log.warning("sink %r failed, and is disabled: %r", sink, error, exc_info=True)
                self._failed.append(sink)

    def _hangs(self) -> None:
        _log.warning("a sink of log= hung for %g s; steps that were not written are lost.", _SECONDS_TO_END)
