"""The key figures of a run, where it came from, and what differs between two."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from adaptive.observe.scalars import counted

from .columns import Columns
from .formatting import duration, number, percent

_NOTABLE = 0.02  # of the time for an example; causes of less are left out
_AT_THE_END = 0.02  # of the steps, over which a metric's median is its value at the end


def figures(run: Columns) -> list[tuple[str, str, str]]:
    """Return the key figures: name, value, and a second value or a range."""
    ledger, active = run.ledger, (run.sizes > 0).sum(1)
    few, many = np.percentile(run.seconds, [10, 90])
    rows = [
        ("took", duration(ledger.wall), counted(max(ledger.starts, 1), "start")),
        ("training (goodput)", percent(ledger.goodput), "computing and exchanging"),
        ("median step", duration(float(np.median(run.seconds))), f"{duration(few)} to {duration(many)} (p10, p90)"),
        ("examples a second", number(float(f"{_rate(run):.3g}")), "in steps"),
        ("epochs", number(round(float(run.record["epoch"][-1]), 2)), f"{run.examples[-1]:,} examples"),
        ("workers", f"{active[-1]}", _range(active)),
        ("global batch", f"{run.global_batch[-1]:,}", _range(run.global_batch)),
        ("repeated steps", f"{ledger.repeated:,}", f"in {counted(ledger.restores, 'restore')}"),
        ("skipped steps", f"{run.skipped.sum():,}", percent(run.skipped.mean())),
        ("steps with lost workers", f"{ledger.losses:,}", ""),
    ]
    return [row for row in rows if row[1] != "0"]


def _rate(run: Columns) -> float:
    return float(run.examples[-1] / max(run.elapsed[-1], 1e-9))


def _range(values: np.ndarray) -> str:
    return f"from {values.min():,} to {values.max():,}" if values.min() < values.max() else "throughout"


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


def compare(runs: Sequence[Columns]) -> list[tuple[str, str, str]]:
    """Return what differs between two runs, each with the values of both: key figures, where the time of an example
    goes, metrics after the same number of examples, and what the runs were made with.
    """
    common = min(int(run.examples[-1]) for run in runs)
    both = [
        {name: value for name, value, _ in figures(run)} | _causes(run) | _after(run, common) | about(run)
        for run in runs
    ]
    both[1]["examples a second"] += f", {_rate(runs[1]) / _rate(runs[0]):.2f} times as many"
    names = [name for name in {**both[0], **both[1]} if name != "began"]
    rows = [(name, both[0].get(name, "–"), both[1].get(name, "–")) for name in names]
    return [row for row in rows if row[1] != row[2]]


def _causes(run: Columns) -> dict[str, str]:
    """Return the seconds of a thousand examples by cause, the costliest first."""
    each = {name: 1e3 * s / run.examples[-1] for name, s in run.ledger.by_rank() if s >= _NOTABLE * run.ledger.wall}
    return {f"{name} of 1,000 examples": duration(seconds) for name, seconds in each.items()}


def _after(run: Columns, examples: int) -> dict[str, str]:
    """Return the time in steps, metrics and logged values after so many examples."""
    end = min(int(np.searchsorted(run.examples, examples)), len(run) - 1)
    found = {"time": duration(float(run.elapsed[end]))} | last_values(run, end + 1)
    return {f"{name} after {counted(examples, 'example')}": value for name, value in found.items()}


def last_values(run: Columns, end: int | None = None, most: int | None = None) -> dict[str, str]:
    """Return the first metrics before row `end`, each the median of the last steps, and the last logged values."""
    end, found = len(run) if end is None else end, {}
    for name, values in [*run.metrics.items()][:most] + [*run.logged.items()][:most]:
        is_logged = name in run.logged
        known = values[0 if is_logged else end - max(1, int(_AT_THE_END * end)) : end]
        known = known[known == known][-1 if is_logged else 0 :]
        median = np.quantile(known, 0.5, method="lower") if len(known) else np.nan  # of infinities, too
        found[name] = number(float(median))
    return found
