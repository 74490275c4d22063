"""What differs between two recorded runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from adaptive.observe.scalars import counted

from .columns import Columns
from .formatting import duration, number, percent

_NOTABLE = 0.02  # of the time for an example; causes of less are left out
_AT_THE_END = 0.02  # of the run's steps, over which a metric's median is its value at the end


def compare(runs: Sequence[Columns]) -> list[tuple[str, str, str]]:
    """Return what differs between two runs, each with the values of both: speed, where the time of an example goes,
    metrics after the same number of examples, what happened, and what the runs were made with.
    """
    both = [{**_speed(run), **_at_the_end(run, runs), **_events(run), **about(run)} for run in runs]
    both[1]["examples a second"] += f", {_rate(runs[1]) / _rate(runs[0]):.2f} times as many"
    names = [name for name in {**both[0], **both[1]} if name != "began"]
    rows = [(name, both[0].get(name, "–"), both[1].get(name, "–")) for name in names]
    return [row for row in rows if row[1] != row[2]]


def about(run: Columns) -> dict[str, str]:
    """Return where a run came from: when it began, hosts, command, versions, and arguments of `Program`."""
    origins = [origin for origin in run.record["origin"] if origin]
    if not origins:
        return {}
    last = origins[-1]
    began = datetime.fromtimestamp(origins[0]["process"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    rows = {"began": began, "processes that recorded": f"{len(origins)}", "hosts": ", ".join(last["hosts"])}
    rows["command"] = " ".join(last["command"])
    return rows | dict(last["versions"]) | {name: _as_text(value) for name, value in last["settings"].items()}


def _as_text(value: Any) -> str:
    """Return a setting as text; a list of equal values as one value and their number."""
    if isinstance(value, list) and len(value) > 1 and len({repr(v) for v in value}) == 1:
        return f"{len(value)} × {_as_text(value[0])}"
    return ", ".join(map(_as_text, value)) if isinstance(value, list) else str(value)


def _rate(run: Columns) -> float:
    return float(run.examples[-1] / max(run.elapsed[-1], 1e-12))


def _speed(run: Columns) -> dict[str, str]:
    """Return examples a second, and the seconds of a thousand examples by cause, the costliest first."""
    found = {"examples a second": number(_rate(run)), "median step": duration(float(np.median(run.seconds)))}
    found["goodput"] = percent(run.ledger.goodput)
    each = {name: 1e3 * s / run.examples[-1] for name, s in run.ledger.seconds.items()}
    shown = [name for name in sorted(each, key=lambda name: -each[name]) if each[name] >= _NOTABLE * sum(each.values())]
    return found | {f"{name} of 1,000 examples": duration(each[name]) for name in shown}


def _at_the_end(run: Columns, runs: Sequence[Columns]) -> dict[str, str]:
    """Return metrics, and the time in steps, after as many examples as the shorter run has."""
    common = min(int(other.examples[-1]) for other in runs)
    end = min(int(np.searchsorted(run.examples, common)), len(run) - 1)
    many = max(1, int(_AT_THE_END * min(map(len, runs))))
    after = f"after {counted(common, 'example')}"
    found = {f"time {after}": duration(float(run.elapsed[end]))}
    for name, values in run.metrics.items():
        known = values[max(0, end + 1 - many) : end + 1]
        found[f"{name} {after}"] = number(_median(known[known == known]))
    for name, values in run.logged.items():
        known = values[: end + 1]
        found[f"{name} {after}"] = number(_median(known[known == known][-1:]))
    return found


def _median(known: np.ndarray) -> float:
    """Return the median of numbers that may be infinite; NaN if there are none."""
    return float(np.quantile(known, 0.5, method="lower")) if len(known) else float("nan")


def _events(run: Columns) -> dict[str, str]:
    counts = {
        "workers at the end": (run.sizes[-1] > 0).sum(),
        "global batch at the end": run.global_batch[-1],
        "changes of batch sizes": len(run.resized),
        "steps with a loss": run.record["lost"].astype(bool).sum(),
        "skipped steps": run.skipped.sum(),
        "restores": run.record["restores"].sum(),
    }
    return {name: f"{count:,}" for name, count in counts.items()}
