"""What differs between two recorded runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from .columns import Columns
from .formatting import counted, duration, number, percent

_NOTABLE = 0.02  # of the time for an example; smaller differences of causes are left out
_AT_THE_END = 0.02  # of the run's steps, over which a metric's median is its value at the end


def compare(runs: Sequence[Columns]) -> list[tuple[str, str, str]]:
    """Return what differs between two runs, each with the values of both: speed, where the time of an example goes,
    metrics after the same number of examples, what happened, and what the runs were made with.
    """
    pairs = [*_speed(runs), *_causes(runs), *_metrics(runs), *_events(runs)]
    settings = [about(run) for run in runs]
    names = [name for name in {**settings[0], **settings[1]} if name != "began"]
    pairs += [(name, [rows.get(name, "–") for rows in settings]) for name in names]
    return [(what, first, second) for what, (first, second) in pairs if first != second]


def about(run: Columns) -> dict[str, str]:
    """Return where a run came from: when it began, hosts, command, commit, versions, and arguments of `Program`."""
    origins = [origin for origin in run.record["origin"] if origin]
    if not origins:
        return {}
    last = origins[-1]
    began = datetime.fromtimestamp(origins[0]["process"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    rows = {"began": began, "processes that recorded": f"{len(origins)}", "hosts": ", ".join(last["hosts"])}
    rows |= {"command": " ".join(last["command"]), "commit": last["commit"] or "not in a git checkout"}
    return rows | dict(last["versions"]) | {name: _as_text(value) for name, value in last["settings"].items()}


def _as_text(value: Any) -> str:
    """Return a setting as text; a list of equal values as one value and their number."""
    if isinstance(value, list) and len(value) > 1 and len({repr(v) for v in value}) == 1:
        return f"{len(value)} × {_as_text(value[0])}"
    return ", ".join(map(_as_text, value)) if isinstance(value, list) else str(value)


def _speed(runs: Sequence[Columns]) -> Iterator[tuple[str, list[str]]]:
    rates = [float(run.examples[-1] / max(run.elapsed[-1], 1e-12)) for run in runs]
    ratio = rates[1] / rates[0]
    yield "examples a second", [number(rates[0]), f"{number(rates[1])}, {ratio:.2f} times as many"]
    yield "median step", [duration(float(np.median(run.seconds))) for run in runs]
    yield "goodput", [percent(run.ledger.goodput) for run in runs]


def _causes(runs: Sequence[Columns]) -> Iterator[tuple[str, list[str]]]:
    """Compare the seconds of a thousand examples by cause, the largest difference first."""
    each = [{name: 1e3 * s / run.examples[-1] for name, s in run.ledger.seconds.items()} for run in runs]
    changes = {name: abs(each[1][name] - each[0][name]) for name in each[0]}
    for name in sorted(changes, key=lambda name: -changes[name]):
        if changes[name] >= _NOTABLE * sum(each[0].values()):
            yield f"{name} of 1,000 examples", [duration(of[name]) for of in each]


def _metrics(runs: Sequence[Columns]) -> Iterator[tuple[str, list[str]]]:
    """Compare metrics, and the time in steps, after as many examples as the shorter run has."""
    common = min(int(run.examples[-1]) for run in runs)
    ends = [min(int(np.searchsorted(run.examples, common)), len(run) - 1) for run in runs]
    after = f"after {counted(common, 'example')}"
    yield f"time {after}", [duration(float(run.elapsed[end])) for run, end in zip(runs, ends, strict=True)]
    many = max(1, int(_AT_THE_END * min(map(len, runs))))
    for name in (name for name in runs[0].metrics if name in runs[1].metrics):
        values = [run.metrics[name][max(0, end + 1 - many) : end + 1] for run, end in zip(runs, ends, strict=True)]
        yield f"{name} {after}", [number(_median(of)) for of in values]


def _median(values: np.ndarray) -> float:
    """Return the median without NaN, which may be infinite; NaN if all values are."""
    known = values[~np.isnan(values)]
    return float(np.quantile(known, 0.5, method="lower")) if len(known) else float("nan")


def _events(runs: Sequence[Columns]) -> Iterator[tuple[str, list[str]]]:
    counts = [
        {
            "workers at the end": int((run.sizes[-1] > 0).sum()),
            "global batch at the end": int(run.global_batch[-1]),
            "changes of batch sizes": len(run.resized),
            "steps with a loss": sum(bool(lost) for lost in run.record["lost"]),
            "skipped steps": int(run.skipped.sum()),
            "restores": int(run.record["restores"].sum()),
        }
        for run in runs
    ]
    yield from ((name, [f"{of[name]:,}" for of in counts]) for name in counts[0])
