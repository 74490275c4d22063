"""The ledger of a recorded run: how many seconds went to which cause, from the start of its first process to its last
recorded step, restarts included.

A record has three kinds of times. Each step has its end by the wall clock (`at`), its duration by cause (`breakdown`),
and the seconds between it and the step before it by what was done (`between`). The first step of a process has the
times at which the process started and built its program (`origin`). The first step after a restore has the sums of the
steps that were discarded (`resumed`). So the time between two steps' ends splits into causes; the rest that no cause
explains is listed as "unaccounted".

Some steps are longer for a reason: the first one of a process, and those in which a worker joins or is lost. What
exceeds the median of nearby steps, part by part, counts for that reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from adaptive.base.errors import RecordError

from .recorded import read_parts

CAUSES = {
    "computing": "kernels and segments of steps that count",
    "exchanging": "messages of steps that count",
    "input": "waiting for examples",
    "waiting": "waiting for other workers",
    "hooks": "control hooks",
    "start": "from the start of the process until the program is built: imports, the script's preparation",
    "tracing and compiling": "building the program, and waiting for a compiler",
    "first step": "what the first step of a process takes longer than others",
    "evaluating": "program.evaluate",
    "checkpoints": "steps wait for a checkpoint",
    "restore": "program.restore, without compiling",
    "repeated steps": "steps after the restored checkpoint, which were repeated",
    "skipped steps": "steps without an update, because a value was not finite",
    "joins": "what steps with a joining worker take longer than others",
    "repairs": "what steps with a lost worker take longer than others",
    "down": "from the last recorded step until the next process starts",
    "script": "the script's own code between steps, logs included",
    "other": "the rest of steps: this library's own work",
    "unaccounted": "seconds that no measurement explains",
}
PRODUCTIVE = ("computing", "exchanging")
_COLUMN = {name: place for place, name in enumerate(CAUSES)}
_BETWEEN = {"script": "script", "evaluating": "evaluating", "saving": "checkpoints", "restoring": "restore"}
_BETWEEN |= {"waiting": "waiting", "compiling": "tracing and compiling"}  # others: steps that were not recorded
_NEARBY = 20  # steps whose median is the usual duration of a step


class Ledger(NamedTuple):
    """Seconds by cause, in consecutive intervals of a run.

    Attributes:
      ends: when each interval ended, in seconds since 1970; shape=(k,). An interval begins where the one before ended.
      seconds: seconds of each interval by cause, in the order of `CAUSES`; shape=(k, causes).
      steps: the number of steps that count.
      starts: the number of processes that recorded.
      restores: the number of restores.
      repeated: the number of steps that were taken again.
      examples_lost: the number of examples in them.
      losses: the number of steps in which workers were lost, including steps that were taken again.
    """

    ends: np.ndarray
    seconds: np.ndarray
    steps: int
    starts: int
    restores: int
    repeated: int
    examples_lost: int
    losses: int

    @property
    def wall(self) -> float:
        """Seconds from the run's beginning to its last recorded step."""
        return float(self.seconds.sum())

    def by_cause(self, last: float | None = None) -> dict[str, float]:
        """Return the seconds of each cause over the run, or over its last seconds."""
        totals = self.seconds.sum(0) if last is None else self._window(self.ends[-1:], last)[0]
        return dict(zip(CAUSES, map(float, totals), strict=True))

    def worst(self, window: float) -> dict[str, float] | None:
        """Return the seconds by cause of the window of this many seconds with the least productive time; `None` if the
        run is shorter.
        """
        ends = self.ends[self.ends - self._begin >= window]
        if not len(ends):
            return None
        windows = self._window(ends, window)
        worst = windows[:, [_COLUMN[name] for name in PRODUCTIVE]].sum(1).argmin()
        return dict(zip(CAUSES, map(float, windows[worst]), strict=True))

    @property
    def _begin(self) -> float:
        return float(self.ends[0] - self.seconds[0].sum())

    def _window(self, ends: np.ndarray, seconds: float) -> np.ndarray:
        """Return the seconds by cause in windows that end at these times; shape=(len(ends), causes)."""
        times = np.concatenate([[self._begin], self.ends])
        so_far = np.concatenate([np.zeros((1, len(CAUSES))), self.seconds.cumsum(0)])
        begins = np.maximum(ends - seconds, times[0])
        columns = [np.interp(ends, times, column) - np.interp(begins, times, column) for column in so_far.T]
        return np.stack(columns, 1)


def goodput(by_cause: Mapping[str, float]) -> float:
    """Return the share of productive seconds (`PRODUCTIVE`) among all; NaN of no seconds."""
    total = sum(by_cause.values())
    return sum(by_cause[name] for name in PRODUCTIVE) / total if total else float("nan")


def read_ledger(path: str | Path, run: int = -1) -> Ledger:
    """Read the ledger of one run of a record.

    Args:
      path: the file that `Program.run(record=…)` writes.
      run: index of the run, if the file holds several; by default the last.

    Raises:
      RecordError: the file is not a record, has no such run, or, like older records, has no wall-clock times.
      OSError: the file cannot be read.
    """
    book = _Book()
    for part in read_parts(path, run):
        names = part.header.get("breakdown", ())
        for number, fields in part.steps:
            try:
                book.add(names, fields)
            except (KeyError, TypeError, ValueError) as error:
                raise RecordError(
                    f"{path}:{number}: a step without {error}. A ledger needs a record with wall-clock times, which "
                    "versions from before the ledger did not write. Record the run again."
                ) from error
    if not book.steps:
        raise RecordError(f"{path}: the run has no steps. Was it stopped before its first one was done?")
    return book.close()


class _Book:
    """The intervals of a run, while its steps are read."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._rows: list[np.ndarray] = []
        self._at: float | None = None  # the end of the accounted time
        self._usual: dict[tuple[str, ...], deque[list[float]]] = {}
        self._pending: list[tuple[int, tuple[str, ...], list[float], str]] = []  # rows whose excess is not known yet
        self.steps = self.starts = self.restores = self.repeated = self.examples_lost = self.losses = 0

    def add(self, names: Iterable[str], fields: dict[str, Any]) -> None:
        """Add a step.

        Args:
          names: of the parts of its breakdown.
          fields: of its line.

        Raises:
          KeyError: a field that the ledger needs is missing.
        """
        names, end, breakdown = tuple(names), fields["at"], fields["breakdown"]
        origin, between = fields.get("origin"), fields.get("between", {})
        for mark in fields.get("resumed", ()):
            self._discarded(mark)
        if origin is not None:
            self._started(origin)
            self.starts += 1
        if self._at is None:
            self._at = end - sum(breakdown) - sum(between.values())
        row = self._interval(end, _of_between(between))
        lost, joined = bool(fields.get("lost")), bool(fields.get("joined"))
        self.losses += lost
        if fields.get("skipped"):
            row[_COLUMN["skipped steps"]] += sum(breakdown)
        else:
            self._share(row, names, breakdown)
            first = "first step" if origin is not None else "joins" if joined else ""
            self._compare(names, breakdown, "repairs" if lost else first)
        row[_COLUMN["unaccounted"]] -= sum(breakdown)
        self.steps += 1

    def _interval(self, end: float, seconds: Mapping[str, float]) -> np.ndarray:
        """Add the interval up to `end`; what `seconds` do not explain is unaccounted. An interval has no negative
        length, although clocks of two hosts may differ.
        """
        assert self._at is not None
        end = max(end, self._at)
        row = np.zeros(len(CAUSES))
        for name, s in seconds.items():
            row[_COLUMN[name]] += s
        row[_COLUMN["unaccounted"]] = end - self._at - row.sum()
        self._ends.append(end)
        self._rows.append(row)
        self._at = end
        return row

    def _started(self, origin: Mapping[str, float]) -> None:
        """Add the time from the last step to the end of the building of a new process's program."""
        if self._at is None:
            self._at = origin["process"]
        for until, cause in (("process", "down"), ("build", "start"), ("built", "tracing and compiling")):
            length = max(0.0, origin[until] - self._at)
            self._interval(origin[until], {cause: length})

    def _discarded(self, mark: Mapping[str, Any]) -> None:
        """Add the time of steps that were discarded in a restore."""
        self.restores += 1
        self.repeated += mark["repeated"]
        self.examples_lost += mark.get("examples", 0)
        self.losses += mark.get("losses", 0)
        if not mark["repeated"]:
            return
        origins, parts = mark["origins"], _of_between(mark["between"])
        parts["repeated steps"] = mark["seconds"]
        if self._at is None and not origins:
            self._at = mark["to"] - sum(parts.values())
        for origin in origins:
            if origin["last"] is not None and self._at is not None:  # its part of the discarded time comes first
                span = max(0.0, origin["last"] - self._at)
                whole = sum(parts.values())
                part = min(1.0, span / whole) if whole else 0.0
                self._interval(origin["last"], {name: s * part for name, s in parts.items()})
                parts = {name: s * (1 - part) for name, s in parts.items()}
            self._started(origin)
            self.starts += 1
        self._interval(mark["to"], parts)

    def _share(self, row: np.ndarray, names: tuple[str, ...], breakdown: list[float]) -> None:
        for name, s in zip(names, breakdown, strict=True):
            row[_COLUMN["tracing and compiling" if name == "compiling" else name]] += s

    def _compare(self, names: tuple[str, ...], breakdown: list[float], why: str) -> None:
        """Collect usual steps; move what an unusual one, for the cause `why`, takes longer than these."""
        usual = self._usual.setdefault(names, deque(maxlen=_NEARBY))
        if why:
            self._pending.append((len(self._rows) - 1, names, breakdown, why))
        else:
            usual.append(breakdown)
        if self._pending and len(usual) == _NEARBY:
            self._settle()

    def _settle(self) -> None:
        """Move the excess of the unusual steps so far to their causes."""
        for place, names, breakdown, why in self._pending:
            usual = self._usual[names]
            median = np.median(usual, axis=0) if usual else np.asarray(breakdown)
            for name, s, normal in zip(names, breakdown, median, strict=True):
                if name != "compiling" and s > normal:
                    self._rows[place][_COLUMN[name]] -= s - normal
                    self._rows[place][_COLUMN[why]] += s - normal
        self._pending.clear()

    def close(self) -> Ledger:
        """Return the ledger of the steps so far."""
        self._settle()
        counts = self.steps, self.starts, self.restores, self.repeated, self.examples_lost, self.losses
        return Ledger(np.array(self._ends), np.stack(self._rows), *counts)


def _of_between(between: Mapping[str, float]) -> dict[str, float]:
    """Return seconds between steps by cause."""
    found: dict[str, float] = {}
    for name, seconds in between.items():
        cause = _BETWEEN.get(name, "script")
        found[cause] = found.get(cause, 0.0) + seconds
    return found
