"""Sinks, which write the steps of a run, and the thread that passes events to a sink.

A sink is slow compared with a step: encoding a line of JSON takes as long as a small kernel, a network service takes
seconds. Each sink therefore has a thread. The step only appends its event to a queue; the thread copies values from the
device and writes several steps at a time.

A sink that fails is disabled, and the run continues.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from adaptive.base.ambient import without_debug_checks
from adaptive.base.errors import DriverError
from adaptive.base.exit_hooks import register_exit_hook
from adaptive.base.world import World

from .events import StepEvent, Unsubscribe

INTERVAL = 0.5  # seconds between two batches of writes; 0: write in the step
_AT_A_TIME = 1e-3  # seconds between yields of the GIL to the step; each yield costs some microseconds
_MOST_WAITING = 4096  # queued steps; a sink that is further behind loses steps until it has caught up
_SECONDS_TO_END = 10.0  # to wait for a write that is under way
_REMEMBERED = 3  # intervals whose steps other ranks keep, in case rank 0 is lost before it writes them

_log = logging.getLogger("adaptive")


class Resumption(NamedTuple):
    """The point of a run at which a sink starts to write, or starts again.

    Attributes:
      step: the last valid step; 0 at the beginning. Later steps of this run that the sink has written are repeated.
      run_id: identifies the run. Steps of other runs stay.
      restored: whether the program was restored, so that later steps are repeated. Otherwise `run()` was called again,
        or another process has written the run so far.
    """

    step: int
    run_id: str
    restored: bool


class Sink(Protocol):
    """A destination for the steps of a run, for `program.run(log=[…])`: an object with these methods.

        class Prints:
            def write(self, event):
                print(event.report.step, event.scalars["loss"])

            def close(self):
                pass

    The methods are called on rank 0, from one thread other than the main thread. Two methods are optional:

    `flush()` is called about twice a second, after the writes, and before a checkpoint is stored: the checkpoint of a
    step is on the disk only after the logs hold that step.

    `resume(resumption)`, with an `ad.log.Resumption`, is called before the first `write` of each `program.run`, and
    whenever the next `write` is not the step after the last one: the program was restored, or another process wrote the
    steps so far because it had rank 0. Of a step that is written several times, the last one counts.
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
        if not callable(getattr(sink, "write", None)) or not callable(getattr(sink, "close", None)):
            raise DriverError(
                f"log= takes sinks, which have write(event) and close(); got {sink!r}. For example:\n"
                '    program.run(epochs=10, log=[ad.log.TensorBoard("runs/a"), ad.log.CSV("run.csv")])'
            )
        if hasattr(sink, "fileno") or hasattr(sink, "readline"):
            raise DriverError(f"log= takes sinks, not files: {sink!r}. Write  ad.log.JSONL(path)  or  ad.log.CSV(path)")
    return found


class _Step(NamedTuple):
    """A queued step; with a resumption if it does not follow the last step."""

    event: StepEvent
    resumption: Resumption | None


class SinkThread:
    """A listener that passes events to a sink, in a thread, while this process has rank 0.

    The first event is written in the step, so that a sink that cannot write at all is noticed at once. A process with
    another rank keeps the last events: if rank 0 is lost before it has written them, and this process becomes rank 0,
    this process writes them.
    """

    def __init__(self, sink: Sink, world: World):
        self._sink, self._world = sink, world
        self._waiting: deque[_Step] = deque()
        self._recent: deque[tuple[float, StepEvent]] = deque(maxlen=_MOST_WAITING)  # while another process has rank 0
        self._last: tuple[str, int] | None = None  # run and step of the last event
        self._resumption: Resumption | None = None  # of the next step to be written
        self._behind = self._noted = False
        self._failure: Exception | None = None
        self._writing = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._forget = register_exit_hook(self.close)

    def __call__(self, event: StepEvent) -> None:
        if self._world.rank:
            self._remember(event)
            return
        if self._failure is not None:
            raise self._no_more(self._failure)
        if self._recent:
            self._take_over()
        self._note_order(event)
        if len(self._waiting) < _MOST_WAITING:
            self._put(event)
            self._behind &= bool(len(self._waiting) > 1)
        elif not self._behind:
            self._behind = True
            _log.warning("%s cannot keep up: steps are omitted from step %s on.", self, event.report.step)
        if self._thread is None or not INTERVAL:
            self._begin()
            if self._failure is not None:
                raise self._no_more(self._failure)

    def _note_order(self, event: StepEvent) -> None:
        """Note a resumption for the sink if this step does not follow the last one."""
        step, before = event.report.step, self._resumption
        if self._last != (event.run_id, step - 1):
            new = Resumption(step - 1, event.run_id, event.restored)
            if before is not None and before.run_id == new.run_id:  # its steps were left out
                new = Resumption(min(before.step, new.step), new.run_id, before.restored or new.restored)
            self._resumption = new
        self._last = event.run_id, step

    def _put(self, event: StepEvent) -> None:
        self._waiting.append(_Step(event, self._resumption))
        self._resumption = None

    def _remember(self, event: StepEvent) -> None:
        now = time.monotonic()
        self._recent.append((now, event))
        while self._recent[0][0] < now - _REMEMBERED * INTERVAL:
            self._recent.popleft()

    def _take_over(self) -> None:
        """Write the last steps again: the process that had rank 0 may have been lost before it wrote them."""
        events = [event for _, event in self._recent]
        self._recent.clear()
        self._last, self._resumption = None, None
        self._note_order(replace(events[0], restored=False))
        for event in events:
            if event is not events[0]:
                self._note_order(event)
            self._put(event)

    def _begin(self) -> None:
        self._drain()
        if self._thread is None and self._failure is None:
            self._thread = threading.Thread(target=self._run, name="adaptive-log", daemon=True)
            self._thread.start()

    def flush(self) -> None:
        """Write all queued steps; waits at most some seconds for a sink that hangs."""
        if self._failure is None and not self._world.rank:
            self._drain()

    def _run(self) -> None:
        while INTERVAL and self._failure is None and not self._closed.wait(INTERVAL):
            self._drain()

    @without_debug_checks
    def _drain(self) -> bool:
        """Write the queued steps, unless the sink has failed. Returns False if the sink still hangs in a write."""
        if not self._writing.acquire(timeout=_SECONDS_TO_END):
            _log.warning("%s hung for %g s; steps that were not written are lost.", self, _SECONDS_TO_END)
            return False
        try:
            wrote, since = False, time.perf_counter()
            while self._waiting and self._failure is None:
                self._write(self._waiting.popleft())
                wrote = True
                if time.perf_counter() - since > _AT_A_TIME:
                    time.sleep(0)  # yield the GIL to the step
                    since = time.perf_counter()
            if wrote and hasattr(self._sink, "flush"):
                self._sink.flush()
        except Exception as error:
            self._failure = error
            self._waiting.clear()
        finally:
            self._writing.release()
        return True

    def _write(self, step: _Step) -> None:
        resume = getattr(self._sink, "resume", None)
        if step.resumption is not None and resume is not None:
            resume(step.resumption)
        self._sink.write(step.event)

    def _no_more(self, error: Exception) -> Unsubscribe:
        self._noted = True
        if isinstance(error, Unsubscribe):
            return error
        _log.warning("%s failed:", self, exc_info=error)
        return Unsubscribe(f"{self} failed, and is disabled: {error!r}")

    def close(self) -> None:
        """Write the queued steps, and close the sink. Does nothing in a forked child: the parent writes them."""
        if self._closed.is_set() or os.getpid() != self._pid:
            return
        self._closed.set()
        self._forget()
        if self._drain():
            try:
                self._sink.close()
            except Exception as error:
                self._failure = self._failure or error
            if self._thread is not None:
                self._thread.join()  # no thread may be running when the interpreter exits
        if self._failure is not None and not self._noted:  # after the last step no report can carry a note
            _log.warning("%s", self._no_more(self._failure))

    def __str__(self) -> str:
        return f"sink {type(self._sink).__name__}"
