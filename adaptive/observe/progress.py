"""The progress of a run: a bar with figures on a terminal, plain lines elsewhere.

The step only stores its event. A thread formats the last event twice a second for the bar, or every ten seconds. If no
event has arrived for a while, it reads from the frames of the training thread what that thread is doing, so the line
also explains a run that is stuck.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from adaptive.base.activity import BETWEEN, EVALUATING, NAMES, Activity
from adaptive.base.process.exit_hooks import register_exit_hook
from adaptive.base.process.thread_status import thread_status_of
from adaptive.base.values.ambient import without_debug_checks
from adaptive.base.world import World
from adaptive.runtime.kernels import Kernels

from .events import StepEvent
from .scalars import counted, noise_of, sizes_in_words

BAR_SECONDS, PLAIN_SECONDS = 0.5, 10.0  # between two lines
_EPOCH_SECONDS = 1.0  # least time before the plain line of an epoch's end
_LONG_SECONDS = 1.0  # if a step takes longer, the line says what it waits for
_LONG = 3  # and longer than this many times the last step
_LINES = 10  # examples per second are averaged over so many lines


class Course(NamedTuple):
    """A run that is about to start."""

    name: str  # of the driver
    batch_sizes: tuple[int, ...]  # of the first step
    examples: int | None  # in the data set; `None` if it is not known
    epochs: int | None  # the epoch at whose end the run ends; `None` if epochs do not limit it
    steps: int | None  # the step at which the run ends; `None` if steps do not limit it
    compiles: bool  # whether XLA programs are compiled before the first step


class Progress:
    """A listener that shows the progress of a run, on rank 0; by default on stderr."""

    reads_later = True  # see `Listeners`

    def __init__(
        self, course: Course, world: World, activity: Activity, kernels: Kernels, console: Console | None = None
    ):
        self._course, self._world, self._activity, self._kernels = course, world, activity, kernels
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._training_thread = threading.get_ident()
        self._began = self._last_seen = self._printed = time.monotonic()
        self._last: StepEvent | None = None
        self._shown = deque([(self._began, 0)], maxlen=_LINES)  # time and examples of the last lines
        self._logged: dict[str, float] = {}
        self._asked: Counter[str] = Counter()  # decisions by hook
        self._steps = self._examples = self._again = 0
        self._bar: Bar | None = None
        self._shows, self._closed = False, threading.Event()
        self._forget = register_exit_hook(self.close)
        if not world.rank:
            workers = counted(sum(size > 0 for size in course.batch_sizes), "worker")
            batch = sizes_in_words(course.batch_sizes)
            examples = "" if course.examples is None else f"{counted(course.examples, 'example')}, "
            self._print(f"{course.name}: {workers}, {examples}batch {batch}")
            if course.compiles:
                self._print("compiling …")
            self._show()

    # --- called from the training thread ------------------------------------------------------------------------------

    def __call__(self, event: StepEvent) -> None:
        report, before = event.report, self._last
        self._last, self._last_seen = event, time.monotonic()
        if before is None:
            self._shown[0] = self._last_seen, report.global_batch
        else:
            self._again += max(before.report.step + 1 - report.step, 0)
        self._asked.update(event.decided)
        self._steps += 1
        self._examples += report.global_batch
        if self._world.rank:
            return
        first = before is None or not self._shows
        if not self._shows:  # the former rank 0 was lost or has left, and this process is rank 0 now
            self._show()
        of_epoch = report.epoch_ended and self._last_seen - self._printed >= _EPOCH_SECONDS
        if self._bar is None and (first or of_epoch):
            self._print(self.line())

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Show further values of a step."""
        self._logged |= values
        if self._shows and self._bar is None:
            self._print("  ".join([f"step {step}", *_in_short(values)]))

    def _show(self) -> None:
        self._shows = True
        if self._console.is_terminal:
            columns = BarColumn(20), TextColumn("{task.description}", markup=False), TimeRemainingColumn(compact=True)
            own = sys.stdout.isatty()  # a redirected stdout stays untouched
            self._bar = Bar(*columns, console=self._console, transient=True, redirect_stdout=own, auto_refresh=False)
            self._bar.add_task("starting", total=self._course.epochs or self._course.steps)
            self._bar.start()
            self._console.show_cursor(True)  # a hidden cursor would stay hidden if this process were killed
        threading.Thread(target=self._keep_showing, name="adaptive-progress", daemon=True).start()

    def close(self, error: BaseException | None = None) -> None:
        """Print how the run ended, and what its hooks asked for."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._forget()
        if self._bar is not None:
            self._bar.stop()
        if self._shows:
            for line in self._summary(error):
                self._print(line)

    # --- called from any thread ---------------------------------------------------------------------------------------

    def _keep_showing(self) -> None:
        while not self._closed.wait(BAR_SECONDS if self._bar is not None else PLAIN_SECONDS):
            if not self._world.rank and not self._world.in_reserve:
                self.refresh()

    def refresh(self) -> None:
        """Show the present line."""
        if self._bar is None:
            self._print(self.line())
        else:
            last, done = self._last, 0.0
            if last is not None:
                done = last.epoch if self._course.epochs else last.report.step
            self._bar.update(self._bar.task_ids[0], description=self.line(), completed=done, refresh=True)

    def _print(self, line: str) -> None:
        self._printed = time.monotonic()
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    @without_debug_checks
    def line(self) -> str:
        """Return the line that is shown now."""
        event, now, waits = self._last, time.monotonic(), self._waits_for()
        if event is None:
            return waits or "starting"
        since, before = self._shown[0]
        self._shown.append((now, self._examples))
        rate = (self._examples - before) / (now - since) if now > since + 0.1 else event.report.examples_per_second
        return "  ".join([*self._figures(event, rate), *([waits] if waits else [])])

    def _figures(self, event: StepEvent, rate: float) -> list[str]:
        report, course = event.report, self._course
        return [
            f"epoch {event.epoch:.1f}{f'/{course.epochs}' if course.epochs else ''}",
            f"step {report.step}{f'/{course.steps}' if course.steps else ''}",
            *_metrics_in_short(event),
            *_in_short(self._logged),
            f"{rate:,.0f} examples/s",
            f"batch {sizes_in_words(report.batch_sizes)}",
            *_noise_in_short(event),
        ]

    def _waits_for(self) -> str:
        """Return what a stuck run is waiting for, or what compiles in the background; "" for neither."""
        still, last = time.monotonic() - self._last_seen, self._last
        if last is None or still >= max(_LONG_SECONDS, _LONG * last.report.seconds):
            now, what = self._activity.now, thread_status_of(sys._current_frames().get(self._training_thread))
            words = str(what) if now == BETWEEN and what.words else NAMES[now]
            if what.compiles:
                words = "compiling the evaluation" if now == EVALUATING else "compiling"
            return f"waiting {still:.0f} s: {words}{f', {what.line}' if words == 'script' else ''}"
        return "" if self._kernels.warm else "(compiling kernels)"

    def _summary(self, error: BaseException | None) -> list[str]:
        event, seconds = self._last, time.monotonic() - self._began
        by = "" if error is None or isinstance(error, GeneratorExit) else f" by {type(error).__name__}"
        how = f"{self._course.name} ended{by}"
        if event is None:
            return [f"{how} before its first step, after {seconds:.1f} s"]
        again = f" ({self._again:,} of them again, after a restore)" if self._again else ""
        waited = f"{event.report.waited_seconds:.1f} s of waiting for a compiler"
        parts = f"in {seconds:.1f} s", *self._figures(event, self._examples / seconds), waited
        lines = [f"{how} after {counted(self._steps, 'step')}{again} {', '.join(parts)}"]
        for hook in event.hooks:
            name = hook.name.partition("/")[2]
            asked = counted(self._asked[name], "request") + f"; the last time none: {hook.why}" * bool(hook.why)
            lines.append(f"{name}: {asked}")
        return lines


# --- formatting -------------------------------------------------------------------------------------------------------


def _metrics_in_short(event: StepEvent) -> list[str]:
    """Format the metric named "loss", or else the first three metrics."""
    scalars = event.scalars
    losses = [name for name in scalars if name.rpartition(".")[2] == "loss"]
    names = losses[:1] or [name for name in scalars if "noise" not in name][:3]
    return _in_short({name or "metric": scalars[name] for name in names})


def _in_short(values: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.4g}" for name, value in values.items()]


def _noise_in_short(event: StepEvent) -> list[str]:
    """Format the noise scale with its bounds, if there is one: "noise 54.6 [41.2, 180]"."""
    noise = noise_of(event)
    if noise is None or noise.scale != noise.scale:
        return []
    scale, lower, upper = (f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in noise)
    return [f"noise {scale}" if noise.lower != noise.lower else f"noise {scale} [{lower}, {upper}]"]
