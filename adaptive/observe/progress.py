"""The progress line of a run: one live line on a terminal, plain lines elsewhere.

The step only stores its event. A thread formats the last event twice a second. If no event has arrived for a while, it
reads from the frames of the training thread what that thread is doing, so the line also explains a run that is stuck.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from adaptive.base.activity import BETWEEN, COMPILING, COMPUTING, EXCHANGING, HOOKS, INPUT, Activity
from adaptive.base.ambient import without_debug_checks
from adaptive.base.exit_hooks import register_exit_hook
from adaptive.base.thread_status import thread_status_of
from adaptive.base.world import World

from .adapted import Adapted
from .events import StepEvent
from .scalars import Noise, noise_of

REFRESH_SECONDS = 0.5
PLAIN_SECONDS = 10.0  # between two plain lines, except at ends of epochs
_EPOCH_SECONDS = 1.0  # least time between the plain lines of two epochs
_LONG_SECONDS = 1.0  # if a step takes longer, the line says what it waits for
_RECENT = 50  # number of steps among which the slowest worker is determined
_WINDOW_SECONDS = 5.0  # over which examples per second are averaged
_NOTABLE = 0.2  # share of the steps' time from which a cause is shown

_log = logging.getLogger("adaptive")


class CompileProgress(Protocol):
    """The state of compilation that the progress line shows."""

    @property
    def warm(self) -> bool:
        """Whether nothing is being compiled."""
        ...

    @property
    def buckets_compiled(self) -> tuple[int, int]:
        """Number of one worker's kernels that are compiled, and that are wanted."""
        ...


@dataclass(frozen=True)
class Course:
    """A run that is about to start, as the progress line shows it.

    Attributes:
      name: the driver's name.
      batch_sizes: batch sizes of the first step.
      examples: number of examples in the data set.
      epochs: the epoch at whose end the run ends; `None` if epochs do not limit it.
      steps: the step at which the run ends; `None` if steps do not limit it.
      to_compile: number of XLA programs to compile before the first step.
    """

    name: str
    batch_sizes: tuple[int, ...]
    examples: int
    epochs: int | None
    steps: int | None
    to_compile: int

    def begins(self) -> list[str]:
        """Return the lines that are printed at the start."""
        workers = sum(size > 0 for size in self.batch_sizes)
        lines = [
            f"{self.name}: {counted(workers, 'worker')}, {counted(self.examples, 'example')}, "
            f"batch {sizes_in_short(self.batch_sizes)}"
        ]
        return [*lines, f"compiling {counted(self.to_compile, 'program')} …"] if self.to_compile else lines


class Progress:
    """A listener that shows the progress of a run, on rank 0.

    Args:
      course: the run.
      world: the program's world.
      activity: what the training thread is doing.
      kernels: the state of compilation.
      console: a `rich.console.Console`; by default one on stderr.
    """

    def __init__(
        self, course: Course, world: World, activity: Activity, kernels: CompileProgress, console: Any | None = None
    ):
        self._course, self._world, self._activity, self._kernels = course, world, activity, kernels
        self._console = console
        self._live: Any = None
        self._steps_thread = threading.get_ident()
        self._began = self._last_seen = time.monotonic()
        self._last: StepEvent | None = None
        self._recent: deque[StepEvent] = deque(maxlen=_RECENT)
        self._rate, self._adapted = _Rate(), Adapted()
        self._printed = self._epoch_printed = self._began
        self._steps = self._examples = self._again = 0
        self._done = threading.Event()
        self._showing = threading.RLock()
        self._thread: threading.Thread | None = None
        self._forget = register_exit_hook(self.close)
        if not world.rank:
            self._begin()

    # --- called from the training thread ------------------------------------------------------------------------------

    def __call__(self, event: StepEvent) -> None:
        report, first = event.report, self._last is None
        if self._last is not None:
            self._again += max(self._last.report.step + 1 - report.step, 0)
        self._last, self._last_seen = event, time.monotonic()
        self._recent.append(event)
        self._adapted.take(event)
        self._steps += 1
        self._examples += report.global_batch
        if self._world.rank:
            return
        if self._thread is None:  # the former rank 0 was lost or has left, and this process is rank 0 now
            self._begin()
            first = True
        if self._live is None and (first or report.epoch_ended):
            self._print_epoch(first)

    def _print_epoch(self, first: bool) -> None:
        now = time.monotonic()
        if first or now - self._epoch_printed >= _EPOCH_SECONDS:
            self._epoch_printed = now
            self._print(self._line())

    def _begin(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = self._console or Console(stderr=True, highlight=False, soft_wrap=True)
        if self._last is None:
            for line in self._course.begins():
                self._print(line)
        if self._console.is_terminal:
            own = sys.stdout.isatty()  # a redirected stdout stays untouched
            self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=own)
            self._live.start()
            self._console.show_cursor(True)  # a hidden cursor would stay hidden if this process were killed
        self._thread = threading.Thread(target=self._run, name="adaptive-progress", daemon=True)
        self._thread.start()

    def close(self, error: BaseException | None = None) -> None:
        """Print how the run ended, and which sizes and values adapted."""
        if self._done.is_set():
            return
        self._done.set()
        self._forget()
        if self._thread is None:
            return
        with self._showing:
            if self._live is not None:
                self._live.stop()
                self._live = None
            self._print(self._summary(error))
            if adapted := self._adapted.line(compiling=not self._kernels.warm):
                self._print(adapted)
        self._thread.join(REFRESH_SECONDS)  # no thread may be running when the interpreter exits

    # --- called from the line's own thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._done.wait(REFRESH_SECONDS):
            try:
                self._look()
            except Exception:
                _log.warning("the progress line failed, and is disabled:", exc_info=True)
                return

    @without_debug_checks
    def _look(self) -> None:
        with self._showing:
            if self._done.is_set() or self._world.rank or self._world.in_reserve:
                return
            self._rate.add(time.monotonic(), self._examples)
            if self._live is not None:
                self._live.update(_one_row(self._line()), refresh=True)
            elif time.monotonic() - self._printed >= PLAIN_SECONDS:
                self._print(self._line())

    def _print(self, line: str) -> None:
        self._printed = time.monotonic()
        assert self._console is not None
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _line(self) -> str:
        event, waits = self._last, self._waits_for()
        if event is None:
            return waits or "starting"
        return "  ".join([*figures_in_short(event, self._course, self._rate.per_second), *([waits] if waits else [])])

    def _waits_for(self) -> str:
        """Return what a stuck run is waiting for; otherwise the notable costs of the last steps, or ""."""
        still = time.monotonic() - self._last_seen
        if still >= max(_LONG_SECONDS, 3 * _median_seconds(self._recent)) or self._last is None:
            return f"waiting {still:.0f} s{self._stands_in()}"
        parts = time_lost(list(self._recent))
        parts += [f"{name!r} does nothing: its values are not known" for name in without_values(list(self._recent))]
        if not self._kernels.warm:
            parts.append(f"compiling {self._kernel_in_words()} in the background")
        return f"({'; '.join(parts)})" if parts else ""

    def _stands_in(self) -> str:
        now, what = self._activity.now, thread_status_of(sys._current_frames().get(self._steps_thread))
        if now == COMPILING or what.compiles:
            if self._last is None and self._course.to_compile:
                return f" for the compiler: {counted(self._course.to_compile, 'program')}"
            return f" for the compiler: {self._kernel_in_words()}"
        if now == EXCHANGING:
            who = slowest(list(self._recent))
            others = "other processes" if who is None else f"worker {who}, or other processes,"
            return f" for {others} in message {self._activity.message + 1}"
        words = {INPUT: "input", HOOKS: "the hooks", COMPUTING: "the devices"}
        if now == BETWEEN and not what.words:
            return f" for the script{f', {what.line}' if what.line else ''}"
        return f" for {words[now]}" if now in words else f": {what}"

    def _kernel_in_words(self) -> str:
        there, wanted = self._kernels.buckets_compiled
        return f"kernel {min(there + 1, wanted)} of {wanted}" if wanted else "a program"

    def _summary(self, error: BaseException | None) -> str:
        event, seconds = self._last, time.monotonic() - self._began
        if error is None or isinstance(error, GeneratorExit):
            how = "ended"
        else:
            how = f"ended by {type(error).__name__}"
        if event is None:
            return f"{self._course.name} {how} before its first step, after {seconds:.1f} s"
        report = event.report
        again = f" ({self._again:,} of them again, after a restore)" if self._again else ""
        steps = counted(self._steps, "step") + again
        parts = [
            f"{self._course.name} {how} after {steps} in {seconds:.1f} s: step {report.step}",
            f"epoch {event.epoch:.1f}",
            *_metrics_in_short(event),
            f"{self._examples / seconds:,.0f} examples/s",
            f"batch {sizes_in_short(report.batch_sizes)}",
            f"{counted(report.kernels, 'kernel')} compiled, steps waited {report.waited_seconds:.1f} s for a compiler",
        ]
        return ", ".join(parts)


class _Rate:
    """Examples per second by the wall clock, over the last seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, now: float, examples: int) -> None:
        self._seen.append((now, examples))
        while len(self._seen) > 2 and now - self._seen[0][0] > _WINDOW_SECONDS:
            self._seen.popleft()

    @property
    def per_second(self) -> float | None:
        if len(self._seen) < 2:
            return None
        (since, before), (now, examples) = self._seen[0], self._seen[-1]
        return (examples - before) / (now - since) if now > since else None


# --- formatting -------------------------------------------------------------------------------------------------------


def figures_in_short(event: StepEvent, course: Course, rate: float | None) -> list[str]:
    """Format the progress of a run: "epoch 3/30", "step 69", "loss 0.1589", "3,120 examples/s", …"""
    report = event.report
    epochs = "" if course.epochs is None else f"/{course.epochs}"
    steps = "" if course.steps is None else f"/{course.steps}"
    found = [f"epoch {event.epoch:.1f}{epochs}", f"step {report.step}{steps}", *_metrics_in_short(event)]
    if rate or rate is None:
        found.append(f"{report.examples_per_second if rate is None else rate:,.0f} examples/s")
    found.append(f"batch {sizes_in_short(report.batch_sizes)}")
    noise = noise_of(event)
    return found if noise is None else [*found, noise_in_short(noise)]


def _metrics_in_short(event: StepEvent, most: int = 3) -> list[str]:
    """Format the metric named "loss", or else the first `most` metrics."""
    scalars = event.scalars
    names = [name for name in scalars if name.rpartition(".")[2] == "loss"][:1] or [
        name for name in scalars if "noise" not in name
    ][:most]
    return [f"{name or 'metric'} {scalars[name]:.4g}" for name in names]


def noise_in_short(noise: Noise) -> str:
    """Format a noise scale with its bounds: "noise 54.6 [41.2, 180]"."""
    bounds = "" if np.isnan(noise.lower) else f" [{_brief(noise.lower)}, {_brief(noise.upper)}]"
    return f"noise {_brief(noise.scale)}{bounds}"


def _brief(examples: float) -> str:
    return f"{examples:,.0f}" if examples >= 100 else f"{examples:.3g}"


def sizes_in_short(sizes: tuple[int, ...], most: int = 6) -> str:
    """Format batch sizes: "25 + 24 = 49"; "16 x 30…34 = 512" for many workers."""
    total = sum(sizes)
    taking = [size for size in sizes if size]
    if len(sizes) == 1 or not taking:
        return str(total)
    if len(sizes) <= most:
        return f"{' + '.join(str(size or '-') for size in sizes)} = {total}"
    least, largest = min(taking), max(taking)
    return f"{len(taking)} x {least if least == largest else f'{least}…{largest}'} = {total}"


def time_lost(events: list[StepEvent]) -> list[str]:
    """Return the notable costs of the last steps: the share of input, and of waiting for the slowest worker."""
    seconds = sum(event.report.seconds for event in events)
    if len(events) < 3 or not seconds:
        return []
    parts = []
    input_ = sum(event.report.breakdown.input for event in events)
    if input_ > _NOTABLE * seconds:
        parts.append(f"input {input_ / seconds:.0%} of the time")
    who = slowest(events)
    by_it = [event.workers for event in events if event.workers.busy.argmax() == who]
    waited = sum(float(workers.waiting.max(initial=0.0)) for workers in by_it)
    if waited > _NOTABLE * seconds:
        parts.append(f"others wait for worker {who} {waited / seconds:.0%} of the time")
    return parts


def without_values(events: list[StepEvent]) -> list[str]:
    """Return the names of the hooks with a value that was NaN in all of these steps, as beside a compiler."""
    if len(events) < 3:
        return []
    unknown = [
        {each.name for each in event.hooks if any(np.isnan(value).all() for value in each.values.values())}
        for event in events
        if not event.report.skipped
    ]
    common = set.intersection(*unknown) if unknown else set()
    return [each.name.partition("/")[2] for each in events[-1].hooks if each.name in common]


def slowest(events: list[StepEvent]) -> int | None:
    """Return the worker that was busy for longest in more than half of these steps, or None."""
    last = [int(event.workers.busy.argmax()) for event in events if np.ptp(event.workers.busy) > 0]
    if not last:
        return None
    who = max(set(last), key=last.count)
    return who if 2 * last.count(who) > len(last) else None


def _median_seconds(events: deque[StepEvent]) -> float:
    seconds = [event.report.seconds for event in list(events)]
    return float(np.median(seconds)) if seconds else 0.0


def counted(number: int, what: str) -> str:
    """Format a count with its noun: "1 step", "2,000 steps"."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def _one_row(line: str) -> Any:
    from rich.text import Text

    return Text(line, no_wrap=True, overflow="ellipsis")
