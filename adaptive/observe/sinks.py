"""Where a run's steps are written to: sinks, and how events get to them.

A sink is slow beside a step (a line of JSON takes as long as a small kernel, a service on the network seconds), and
nobody waits for what it does. So each has a thread, which it is told of steps in, some at a time; the step only puts
its event down. Values leave the device in that thread too, when they have long been there.

A sink is beside the point of a run: one that fails is told no more, and the run goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

from adaptive.base.errors import DriverError
from adaptive.base.last_words import at_the_end
from adaptive.base.surroundings import unwatched
from adaptive.base.world import World

from .events import StepEvent, Unsubscribe

INTERVAL = 0.5  # seconds between two writings; 0: in the step
_AT_A_TIME = 1e-3  # seconds for which the step may have to wait; each time it is let go first costs some microseconds
_MOST_WAITING = 4096  # steps; a sink that is further behind is told of no more until it has caught up
_SECONDS_TO_END = 10.0  # for what a sink has begun

_log = logging.getLogger("adaptive")


class Sink(Protocol):
    """What writes down the steps of a run: anything with these methods, given to `program.run(log=[…])`.

        class Prints:
            def write(self, event):
                print(event.report.step, event.scalars["loss"])

            def close(self):
                pass

    They are called on rank 0, from one thread, which is not that of the steps. Where it has a `flush()`, that is called
    about twice a second, behind what was written. A `take_over()` is called before the first `write` where another
    process has written the steps so far: rank 0 was lost, or has left.
    """

    def write(self, event: StepEvent) -> Any:
        """Write a step. Must communicate with no other process."""
        ...

    def close(self) -> Any:
        """The run has ended, well or not. Another run may write to the same sink."""
        ...


def checked(log: Any) -> list[Sink]:
    """The sinks that a run was given.

    Raises:
      DriverError: something is no sink.
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


class Outlet:
    """A listener that hands events on to a sink, in a thread, while this process is rank 0.

    The first is handed on in the step, so that what cannot be written at all is noticed at once.
    """

    def __init__(self, sink: Sink, world: World):
        self._sink, self._world = sink, world
        self._waiting: deque[StepEvent] = deque()
        self._others_wrote = self._behind = self._told = False
        self._failure: Exception | None = None
        self._writing = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._forget = at_the_end(self.close)

    def __call__(self, event: StepEvent) -> None:
        if self._world.rank:
            self._others_wrote = True
            return
        if self._failure is not None:
            raise self._no_more(self._failure)
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(event)
            self._behind &= bool(len(self._waiting) > 1)
        elif not self._behind:
            self._behind = True
            _log.warning("%s cannot keep up: from step %s on steps are left out.", self, event.report.step)
        if self._thread is None or not INTERVAL:
            self._begin()
            if self._failure is not None:
                raise self._no_more(self._failure)

    def _begin(self) -> None:
        take_over = getattr(self._sink, "take_over", None)
        if self._others_wrote and self._thread is None and take_over is not None:
            take_over()
        self._drain()
        if self._thread is None and self._failure is None:
            self._thread = threading.Thread(target=self._run, name="adaptive-log", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while INTERVAL and self._failure is None and not self._closed.wait(INTERVAL):
            self._drain()

    @unwatched
    def _drain(self) -> bool:
        """Hand on what waits; where a sink fails, nothing any more. Returns whether the sink has come back."""
        if not self._writing.acquire(timeout=_SECONDS_TO_END):
            _log.warning("%s has not come back for %g s; what was not written is lost.", self, _SECONDS_TO_END)
            return False
        try:
            wrote, since = False, time.perf_counter()
            while self._waiting and self._failure is None:
                self._sink.write(self._waiting.popleft())
                wrote = True
                if time.perf_counter() - since > _AT_A_TIME:
                    time.sleep(0)  # the step goes first, if it waits for Python's lock
                    since = time.perf_counter()
            if wrote and hasattr(self._sink, "flush"):
                self._sink.flush()
        except Exception as error:
            self._failure = error
            self._waiting.clear()
        finally:
            self._writing.release()
        return True

    def _no_more(self, error: Exception) -> Unsubscribe:
        self._told = True
        if isinstance(error, Unsubscribe):
            return error
        _log.warning("%s failed:", self, exc_info=error)
        return Unsubscribe(f"{self} failed, and is told no more: {error!r}")

    def close(self) -> None:
        """Hand on what waits, and close the sink."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._forget()
        if self._drain():
            try:
                self._sink.close()
            except Exception as error:
                self._failure = self._failure or error
            if self._thread is not None:
                self._thread.join()  # none of it is to be left when the interpreter ends
        if self._failure is not None and not self._told:  # behind the last step: there is no report to say it in
            _log.warning("%s", self._no_more(self._failure))

    def __str__(self) -> str:
        return f"sink {type(self._sink).__name__}"
