"""The ledger of a recorded run: how many seconds went to which cause, from the start of its first process to its last
recorded step, restarts included.

A record has three kinds of times. Each step has its end by the wall clock (`at`), its duration by cause (`breakdown`),
and the seconds between it and the step before it by what was done (`between`). The first step of a process has the
times at which the process started and built its program (`origin`). What no cause explains is "unaccounted".

Some steps are longer for a reason: the first one of a process, and those in which a worker joins or is lost. What
exceeds the median of the other steps, part by part, counts for that reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from adaptive.base.errors import RecordError

from .reader import read_run

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
_BETWEEN = {"evaluating": "evaluating", "saving": "checkpoints", "restoring": "restore", "waiting": "waiting"}
_BETWEEN |= {"compiling": "tracing and compiling"}  # others, as of steps that were not recorded: "script"


class Ledger(NamedTuple):
    """Seconds of a run by cause, and counts.

    Attributes:
      seconds: seconds by cause (`CAUSES`); they add up to the time from the run's beginning to its last recorded step.
      steps: the number of steps that count.
      starts: the number of processes that recorded.
      restores: the number of restores.
      repeated: the number of steps that were taken again.
      examples_lost: the number of examples in them.
      losses: the number of steps in which workers were lost, including steps that were taken again.
    """

    seconds: dict[str, float]
    steps: int
    starts: int
    restores: int
    repeated: int
    examples_lost: int
    losses: int

    @property
    def wall(self) -> float:
        """Seconds from the run's beginning to its last recorded step."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of productive seconds (`PRODUCTIVE`) among all."""
        return sum(self.seconds[name] for name in PRODUCTIVE) / self.wall if self.wall else float("nan")


def read_ledger(path: str | Path, run: int = -1) -> Ledger:
    """Read the ledger of one run of a record.

    Args:
      path: the file that `Program.run(record=…)` writes.
      run: index of the run, if the file holds several; by default the last.

    Raises:
      RecordError: the file is not a record, or has no such run; or the run has no steps, or no wall-clock times.
      OSError: the file cannot be read.
    """
    header, steps = read_run(path, run, discarded=True)
    book = _Book(header.get("breakdown", ()))
    for number, fields in steps:
        try:
            book.add(fields)
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{path}:{number}: a step without {error}.") from error
    if not book.steps:
        raise RecordError(f"{path}: the run has no steps. Was it stopped before its first one was done?")
    return book.close()


class _Book:
    """The seconds of a run by cause, while its steps are read.

    Args:
      parts: names of the parts of a step.
    """

    def __init__(self, parts: Sequence[str]):
        self._causes = ["tracing and compiling" if name == "compiling" else name for name in parts]
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._at: float | None = None  # the end of the accounted time
        self._rows: list[list[float]] = []  # parts of the steps that count
        self._reasons: list[str] = []  # of each, why it may be longer; "" for most
        self.steps = self._starts = self._restores = self._repeated = self._examples_lost = self._losses = 0

    def add(self, fields: dict[str, Any]) -> None:
        """Add a step.

        Raises:
          KeyError: a field that the ledger needs is missing.
        """
        parts, between, origin = fields["breakdown"], fields.get("between", {}), fields.get("origin")
        known = sum(parts) + sum(between.values())
        if origin is not None:
            self._started(origin)
        if self._at is None:
            self._at = fields["at"] - known
        self._until(fields["at"], "unaccounted")
        self._seconds["unaccounted"] -= known
        for name, s in between.items():
            self._seconds[_BETWEEN.get(name, "script")] += s
        self._losses += bool(fields.get("lost"))
        if fields.get("discarded"):
            self._seconds["repeated steps"] += sum(parts)
            self._repeated += 1
            self._examples_lost += sum(fields["batch_sizes"])
            return
        self.steps += 1
        self._restores += fields.get("restores", 0)
        if fields.get("skipped"):
            self._seconds["skipped steps"] += sum(parts)
            return
        first = "first step" if origin is not None else "joins" if fields.get("joined") else ""
        self._rows.append(parts)
        self._reasons.append("repairs" if fields.get("lost") else first)

    def _started(self, origin: Mapping[str, float]) -> None:
        """Add the time from the last step to the end of the building of a new process's program."""
        self._starts += 1
        if self._at is None:
            self._at = origin["process"]
        for until, cause in (("process", "down"), ("build", "start"), ("built", "tracing and compiling")):
            self._until(origin[until], cause)

    def _until(self, end: float, cause: str) -> None:
        """Add the time up to `end`, which may lie before the last one by the clock of another host."""
        assert self._at is not None
        self._seconds[cause] += max(0.0, end - self._at)
        self._at = max(self._at, end)

    def close(self) -> Ledger:
        """Return the ledger of the steps so far."""
        rows = np.array(self._rows, float).reshape(len(self._rows), len(self._causes))
        reasons = np.array(self._reasons, object)
        if (usual := reasons == "").any():
            more = np.maximum(rows - np.median(rows[usual], axis=0), 0.0)
            more[:, [cause == "tracing and compiling" for cause in self._causes]] = 0.0
            for reason in set(self._reasons) - {""}:
                self._seconds[reason] += float(more[reasons == reason].sum())
            rows[~usual] -= more[~usual]
        for cause, s in zip(self._causes, rows.sum(0), strict=True):
            self._seconds[cause] += float(s)
        counts = self.steps, self._starts, self._restores, self._repeated, self._examples_lost, self._losses
        return Ledger(self._seconds, *counts)
