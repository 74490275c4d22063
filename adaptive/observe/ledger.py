"""The ledger of a recorded run: how many seconds went to which cause, from the start of its first process to its last
recorded step, restarts included.

A record has three kinds of times. Each step has its end by the wall clock (`at`), its duration by cause (`breakdown`),
and the seconds between it and the step before it by what was done (`between`). The first step of a process has the
times at which the process started and built its program (`origin`). What no cause explains is "unaccounted".

Some steps are longer for a reason: the first one of a process, and those in which a worker joins or is lost. What
exceeds the median of the other steps, part by part, counts for that reason.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .reader import Record

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
    "skipped steps": "steps without an update: a value was not finite, or the driver kept its state",
    "joins": "what steps with a joining worker take longer than others",
    "repairs": "what steps with a lost worker take longer than others",
    "down": "from the last recorded step until the next process starts",
    "script": "the script's own code between steps, logs included",
    "other": "the rest of steps: this library's own work",
    "unaccounted": "seconds that no measurement explains",
}
PRODUCTIVE = ("computing", "exchanging")
_NAMES = {"compiling": "tracing and compiling", "saving": "checkpoints", "restoring": "restore"}  # others: the same


class Ledger(NamedTuple):
    """Seconds of a run by cause (`CAUSES`), which add up to the time until its last recorded step; and counts."""

    seconds: dict[str, float]
    steps: int  # that count
    starts: int  # processes that recorded
    restores: int
    repeated: int  # steps that were taken again
    losses: int  # steps in which workers were lost, including steps that were taken again

    @property
    def wall(self) -> float:
        """Seconds from the run's beginning to its last recorded step."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of computing and exchanging in `wall`; NaN for a run that took no time."""
        return sum(self.seconds[cause] for cause in PRODUCTIVE) / self.wall if self.wall else float("nan")

    def by_rank(self) -> list[tuple[str, float]]:
        """Return causes and seconds, the productive ones first, then the costliest."""
        return sorted(self.seconds.items(), key=lambda item: (item[0] not in PRODUCTIVE, -item[1]))


def is_usual(steps: Record) -> np.ndarray:
    """Return whether nothing makes a step longer: a start, restore, join or loss, values not finite; shape=(T,)."""
    events = [steps[name].astype(bool) for name in ("origin", "joined", "lost", "skipped", "restores")]
    return ~np.logical_or.reduce([np.arange(len(steps["step"])) == 0, *events])


def mean_seconds(steps: Record) -> dict[str, np.ndarray]:
    """Return the seconds of each step by cause; shape=(T,) each. Input, computing and waiting of usual steps are means
    over the workers: all steps take equally long, so a mean worker that waits for less time computes for longer.
    """
    found = {name: np.nan_to_num(steps[f"seconds/{name}"]) for name in steps.header["breakdown"]}
    known = (steps.of_workers("busy") > 0) & is_usual(steps)[:, None]

    def mean(name: str) -> np.ndarray:
        column = steps.of_workers(name).sum(1, where=known) / np.maximum(known.sum(1), 1)
        return np.where(known.any(1), column, found[name])

    own, usual, input_, waiting = found["computing"], mean("computing"), mean("input"), mean("waiting")
    computing = own + found["input"] + found["waiting"] - input_ - waiting
    # A worker may also be late for its script: the others wait, and nobody computes for longer or less.
    found["computing"] = np.clip(computing, np.minimum(own, usual), np.maximum(own, usual))
    waiting += computing - found["computing"]
    found["waiting"], found["input"] = np.maximum(waiting, 0.0), input_ + np.minimum(waiting, 0.0)
    return found


def ledger_of(steps: Record) -> Ledger:
    """Return the ledger of all executed steps of a run: `read(path, discarded=True)`."""
    causes = [_NAMES.get(name, name) for name in steps.header["breakdown"]]
    parts = np.stack([*mean_seconds(steps).values()], 1)
    between = {name: np.nan_to_num(column) for name, column in steps.named("between/").items()}
    known = parts.sum(1) + sum(between.values(), np.zeros(len(parts)))
    seconds = dict.fromkeys(CAUSES, 0.0)
    _add_wall(steps, known, seconds)
    for name, column in between.items():
        cause = _NAMES.get(name, name)
        # Other parts, as of steps that were not recorded, are the script's.
        seconds[cause if cause in ("evaluating", "waiting", *_NAMES.values()) else "script"] += float(column.sum())
    discarded, skipped = steps["discarded"], steps["skipped"] & ~steps["discarded"]
    seconds["repeated steps"] = float(parts[discarded].sum())
    seconds["skipped steps"] = float(parts[skipped].sum())
    counts = ~discarded & ~skipped
    usual = counts & is_usual(steps)
    if usual.any():
        more = np.maximum(parts - np.median(parts[usual], axis=0), 0.0)
        more[:, [cause == "tracing and compiling" for cause in causes]] = 0.0
        for cause, name in (("repairs", "lost"), ("first step", "origin"), ("joins", "joined")):
            rows = steps[name].astype(bool) & counts
            seconds[cause] += float(more[rows].sum())
            parts[rows] -= more[rows]
            more[rows] = 0.0  # of two reasons the first counts
    for cause, s in zip(causes, parts[counts].sum(0), strict=True):
        seconds[cause] += float(s)
    starts, losses = (int(steps[name].astype(bool).sum()) for name in ("origin", "lost"))
    restores = int(steps["restores"].sum())
    return Ledger(seconds, int((~discarded).sum()), starts, restores, int(discarded.sum()), losses)


def _add_wall(steps: Record, known: np.ndarray, seconds: dict[str, float]) -> None:
    """Add the wall-clock time beside the `known` seconds of each step: down, starting, unaccounted. By the clock of
    another host time may go backwards; such steps add nothing.
    """
    ends, causes = list(steps["at"]), ["unaccounted"] * len(known)
    for row in np.flatnonzero(steps["origin"].astype(bool))[::-1]:
        origin = steps["origin"][row]
        ends[row:row] = [origin["process"], origin["build"], origin["built"]]
        causes[row:row] = ["down", "start", "tracing and compiling"]
    began = ends[0] if steps["origin"][0] else ends[0] - known[0]
    spans = np.diff(np.maximum.accumulate([began, *ends]))
    for cause, span in zip(causes, spans.tolist(), strict=True):
        seconds[cause] += span
    seconds["unaccounted"] -= float(known.sum())
