"""Write the timelines of all processes as one trace file, in the JSON format of https://ui.perfetto.dev.

Each process is a group of tracks: one for the training thread, one for each of its workers, and one for its compiler. A
process with one worker has steps and work on the worker's track, so that the parts of a step are nested in the step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from adaptive.base.timeline import COMPILER, STEPS, Span, Timeline


class OfProcess(NamedTuple):
    """The timeline of one process, as sent to the process that writes the file."""

    process: str  # its description
    workers: list[int]  # the workers that it runs
    spans: list[Span]
    arrivals: list[float]

    @classmethod
    def of(cls, timeline: Timeline, process: str, workers: Sequence[int]) -> OfProcess:
        """Return this process's timeline."""
        return cls(process, list(workers), timeline.spans, timeline.arrivals)

    def encode(self) -> bytes:
        """Return the timeline as bytes."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, sent: bytes) -> OfProcess:
        """Return the timeline that `encode` encoded."""
        process, workers, spans, arrivals = json.loads(sent)
        return cls(process, workers, [Span(*span) for span in spans], arrivals)


def write_trace(path: Path, all_of_them: Sequence[OfProcess]) -> None:
    """Write the trace file.

    Args:
      path: the file.
      all_of_them: the timelines by rank.

    Raises:
      OSError: the file cannot be written.
    """
    first = min((span[2] for span in all_of_them[0].spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, one in enumerate(all_of_them):
        events += _events(rank, one, first + _ahead(one.arrivals, all_of_them[0].arrivals))
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _ahead(own: Sequence[float], others: Sequence[float]) -> float:
    """Return how many seconds one process's clock is ahead of the other's, from the arrival times of their common
    messages, which arrive at both at nearly the same time. A process that joined later has only the last arrivals.
    """
    together = min(len(own), len(others))
    pairs = zip(own[len(own) - together :], others[len(others) - together :], strict=True)
    return median(a - b for a, b in pairs) if together else 0.0


def _events(rank: int, one: OfProcess, zero: float) -> Iterator[dict[str, Any]]:
    workers: dict[int | str, str] = {i: f"worker {worker}" for i, worker in enumerate(one.workers)}
    tracks = {STEPS: workers[0] if len(workers) == 1 else "steps", **workers, COMPILER: "compiler"}
    numbers = {name: number for number, name in enumerate(dict.fromkeys(tracks.values()))}
    yield from _named("process", {"pid": rank}, one.process, rank)
    for name, number in numbers.items():
        yield from _named("thread", {"pid": rank, "tid": number}, name, number)
    for track, name, began, ended, details in one.spans:
        yield {
            "ph": "X",
            "pid": rank,
            "tid": numbers[tracks[track]],
            "name": name,
            "ts": round(1e6 * (began - zero), 3),
            "dur": round(1e6 * (ended - began), 3),
            "args": details,
        }


def _named(what: str, place: Mapping[str, int], name: str, number: int) -> Iterator[dict[str, Any]]:
    """Yield the events that name a process or a thread, and place it among the others."""
    yield {"ph": "M", **place, "name": f"{what}_name", "args": {"name": name}}
    yield {"ph": "M", **place, "name": f"{what}_sort_index", "args": {"sort_index": number}}
