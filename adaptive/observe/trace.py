"""Write the timelines of all processes as one trace file, for https://ui.perfetto.dev and other readers of its JSON
form.

Each process is a group of tracks: the thread of the steps, one for each of its workers, and its compiler. A process of
one worker has both on the worker's own track, so that what a step consists of lies below it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from adaptive.base.timeline import COMPILER, STEPS, Span, Timeline


class OfProcess(NamedTuple):
    """The timeline of one process, as sent to the process that writes the file."""

    process: str  # in words
    workers: list[int]  # that it carries
    spans: list[Span]
    arrivals: list[float]

    @classmethod
    def of(cls, timeline: Timeline, process: str, workers: Sequence[int]) -> OfProcess:
        """Return this process's timeline."""
        return cls(process, list(workers), timeline.spans, timeline.arrivals)

    def encode(self) -> bytes:
        """Encode as bytes."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, sent: bytes) -> OfProcess:
        """Decode the result of `encode`."""
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
    """Return the offset of a clock to another: a message arrives at both processes at nearly the same time.

    A process that joined later has only the last arrivals.
    """
    together = min(len(own), len(others))
    pairs = zip(own[len(own) - together :], others[len(others) - together :], strict=True)
    return median(a - b for a, b in pairs) if together else 0.0


def _events(rank: int, one: OfProcess, zero: float) -> Iterator[dict[str, Any]]:
    tracks = _tracks(one)
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": one.process}}
    yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for number, name in enumerate(dict.fromkeys(tracks.values())):
        yield {"ph": "M", "pid": rank, "tid": number, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}
    numbers = {name: number for number, name in enumerate(dict.fromkeys(tracks.values()))}
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


def _tracks(one: OfProcess) -> dict[int | str, str]:
    """Return the name of each track."""
    names: dict[int | str, str] = {i: f"worker {worker}" for i, worker in enumerate(one.workers)}
    return {STEPS: names[0] if len(names) == 1 else "steps", **names, COMPILER: "compiler"}
