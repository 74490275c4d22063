"""Where the time of a run went: by cause over the workers' mean, and by worker.

Seconds by cause come from the process that recorded. It may wait more or less than others do, so what each worker
reports of itself replaces its own: waiting, input and computing are means over the workers everywhere in a report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from adaptive.observe.ledger import PRODUCTIVE, Ledger

from .columns import Columns

_OF_WORKERS = ("input", "computing", "waiting")


def windows(rows: int, most: int) -> np.ndarray:
    """Return the first row of each of at most `most` windows of nearly equal length; shape=(windows,)."""
    return np.unique(np.linspace(0, rows, min(rows, most), endpoint=False).astype(int))


def mean_in(values: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Return the mean of the finite values of each window, NaN where there are none; shape=(windows, …)."""
    known = np.isfinite(values)
    count = np.add.reduceat(known, begins, axis=0, dtype=np.int64)
    total = np.add.reduceat(np.where(known, values, 0), begins, axis=0, dtype=np.float64)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


@lru_cache(maxsize=2)
def by_step(run: Columns) -> dict[str, np.ndarray]:
    """Return the seconds of each step by cause, as means over the workers; shape=(T,) each, together `run.seconds`."""
    found, known = dict(run.parts), np.isfinite(run.workers["busy"])
    some, count = known.any(1), np.maximum(known.sum(1), 1)
    off = np.abs(np.nansum(run.workers["waiting"], 0) - run.parts["waiting"][some].sum())
    recorder = int(np.where(known.any(0), off, np.inf).argmin())
    for name in _OF_WORKERS:
        values = run.workers[name]
        mean = np.nansum(values, 1) / count
        own = np.nan_to_num(values[:, recorder]) if name == "computing" else run.parts[name]
        found[name] = np.where(some & known[:, recorder], np.maximum(run.parts[name] + mean - own, 0), run.parts[name])
    found["other"] = np.maximum(run.seconds - sum(s for name, s in found.items() if name != "other"), 0)
    return found


def by_cause(run: Columns, ledger: Ledger) -> dict[str, float]:
    """Return the seconds of the whole run by cause, as means over the workers; together the time that it took."""
    found, added = dict(ledger.seconds), 0.0
    for name in _OF_WORKERS:
        more = float((by_step(run)[name] - run.parts[name])[run.plain].sum())
        found[name], added = found[name] + more, added + more
    for name in ("other", "script", "computing"):  # what the recorder did beyond the workers' mean, or short of it
        taken = min(added, found[name])
        found[name], added = found[name] - taken, added - taken
    return found


def goodput(causes: Mapping[str, float]) -> float:
    """Return the share of training, that is of computing and exchanging, in seconds by cause."""
    return sum(causes[name] for name in PRODUCTIVE) / max(sum(causes.values()), 1e-12)


class SlowPhase(NamedTuple):
    """Workers for which the others waited.

    Attributes:
      workers: their slots.
      first, end: the first row of the phase, and the row after its last one.
      saved: seconds that the run would have been shorter with them as fast as the median of the others.
    """

    workers: list[int]
    first: int
    end: int
    saved: float


_WINDOWS = 40
_SLOWER = 0.1  # of the step: the least excess over the median of the others
_ERRORS = 4.0  # standard errors that the excess must exceed, so that chance alone names nobody


def slow_phases(run: Columns) -> list[SlowPhase]:
    """Return the workers that were steadily slower than most, and when, the costliest first.

    The run is cut into 40 windows. A worker is slow in a window if it is busy for longer than the median worker, by a
    tenth of the step and by four standard errors. Windows in a row, and workers that are slow in the same windows, are
    one phase.
    """
    busy = run.workers["busy"]
    known = np.isfinite(busy)
    if not (known.sum(1) > 1).any():
        return []
    begins = windows(len(run), max(1, min(_WINDOWS, len(run) // 5)))
    others = _median_of_others(busy)
    excess = busy - others
    mean, count = mean_in(excess, begins), np.add.reduceat(np.isfinite(excess), begins, axis=0, dtype=int)
    variance = np.nan_to_num(np.maximum(mean_in(excess**2, begins) - mean**2, 0)).mean(0)  # within windows
    error = np.sqrt(variance / np.maximum(count, 1))
    step = mean_in(np.fmax.reduce(busy, 1), begins)[:, None]
    slow = (mean > np.maximum(_SLOWER * step, _ERRORS * error)) & (count > 1)
    phases: dict[tuple[int, int], list[int]] = {}
    for worker in np.flatnonzero(slow.any(0)):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], slow[:, worker], [0]])))
        for first, end in edges.reshape(-1, 2).tolist():
            place = next((other for other in phases if _alike((first, end), other)), (first, end))
            phases.setdefault(place, []).append(int(worker))
    ends = [*begins.tolist(), len(run)]
    found = [_phase(busy, others, who, ends[first], ends[end]) for (first, end), who in phases.items()]
    return sorted(found, key=lambda phase: -phase.saved)


def _alike(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two spans have most of their windows in common."""
    common = min(one[1], other[1]) - max(one[0], other[0])
    return common >= 0.7 * max(one[1] - one[0], other[1] - other[0])


def _median_of_others(busy: np.ndarray) -> np.ndarray:
    """Return the median of the other workers for each one, the lower one of two; NaN for a single worker."""
    ordered, count = np.sort(busy, axis=1), np.isfinite(busy).sum(1)  # NaNs come last
    rows, middle = np.arange(len(busy)), np.maximum((count - 2) // 2, 0)
    lower, upper = ordered[rows, middle, None], ordered[rows, np.minimum(middle + 1, busy.shape[1] - 1), None]
    return np.where(count[:, None] > 1, np.where(busy <= lower, upper, lower), np.nan)


def _phase(busy: np.ndarray, others: np.ndarray, workers: list[int], first: int, end: int) -> SlowPhase:
    healed = busy[first:end].copy()
    healed[:, workers] = np.fmin(healed[:, workers], others[first:end, workers])
    saved = np.nansum(np.fmax.reduce(busy[first:end], 1) - np.fmax.reduce(healed, 1))
    return SlowPhase(workers, first, end, float(saved))
