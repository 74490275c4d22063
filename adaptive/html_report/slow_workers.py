"""Which workers the others waited for, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .columns import Columns


def windows(rows: int, most: int) -> np.ndarray:
    """Return the first row of each of at most `most` windows of nearly equal length; shape=(windows,)."""
    return np.unique(np.linspace(0, rows, min(rows, most), endpoint=False).astype(int))


def mean_in(values: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Return the mean of the finite values of each window, NaN where there are none; shape=(windows, …)."""
    known = np.isfinite(values)
    count = np.add.reduceat(known, begins, axis=0, dtype=np.int64)
    total = np.add.reduceat(np.where(known, values, 0), begins, axis=0, dtype=np.float64)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


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
