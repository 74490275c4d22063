"""The costliest causes of a run's time beside training, as sentences with figures and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from adaptive.observe.ledger import CAUSES
from adaptive.observe.scalars import listed

from .columns import Columns, mean_in, windows
from .formatting import duration, percent, workers

_LEAST = 0.01  # findings that cost a smaller share of the run are left out
_MUCH_EXCHANGE = 0.3  # of the run

_ADVICE = {
    "input": "Read ahead with num_threads= or num_readers=, or make examples cheaper.",
    "exchanging": "A larger batch has fewer exchanges for its examples.",
    "hooks": "A larger every= calls them less often.",
    "tracing and compiling": "program.warm_up() compiles sizes before the run.",
    "checkpoints": "Write them less often.",
    "repeated steps": "More frequent checkpoints repeat fewer.",
    "other": "A larger batch has fewer steps.",
}


class Finding(NamedTuple):
    """A sentence of the report, with the seconds that it is about."""

    text: str
    seconds: float


def findings(run: Columns) -> list[Finding]:
    """Return what cost at least a hundredth of the run, the most expensive first."""
    total = run.ledger.wall
    found = list(_waiting(run, total))
    for name, seconds in run.ledger.seconds.items():
        share = seconds / total
        text = f"{name.capitalize()} took {percent(share)} of the run: {CAUSES[name]}. {_ADVICE.get(name, '')}"
        if name not in ("computing", "waiting") and (name != "exchanging" or share > _MUCH_EXCHANGE):
            found.append(Finding(text.rstrip(), seconds))
    return sorted((f for f in found if f.seconds >= _LEAST * total), key=lambda f: -f.seconds)


def _waiting(run: Columns, total: float) -> Iterator[Finding]:
    phases = [phase for phase in slow_phases(run) if phase.saved >= _LEAST * total]
    for phase in phases:
        less = f"{duration(phase.saved)} ({percent(phase.saved / total)})"
        when = f"from step {run.step[phase.first]:,} to {run.step[phase.end - 1]:,}"
        when = "throughout" if phase.end - phase.first >= 0.95 * len(run) else when
        them = "it" if len(phase.workers) == 1 else "they"
        text = (
            f"The others waited for {workers(phase.workers)} {when}{_why(run, phase)}. "
            f"Had {them} been as fast as the others, the run would have taken {less} less."
        )
        yield Finding(text, phase.saved)
    waiting = run.ledger.seconds["waiting"]
    rest = waiting - sum(phase.saved for phase in phases)
    of_it = f"{duration(max(rest, 0.0))} of it " if phases else ""
    share = percent(waiting / total)  # the only share of waiting on the page
    yield Finding(f"Workers waited {share} of the run for one another, {of_it}with none steadily slower.", rest)


def _why(run: Columns, phase: SlowPhase) -> str:
    """Return the reason why workers were slow: speed, number of examples, input, or something else."""
    rows, mine = slice(phase.first, phase.end), np.isin(np.arange(run.n), phase.workers)
    sizes = np.where(run.sizes[rows] > 0, run.sizes[rows], np.nan)
    numbers = {name: values[rows] for name, values in run.workers.items()} | {"size": sizes}
    means = {name: (float(np.nanmean(v[:, mine])), float(np.nanmean(v[:, ~mine]))) for name, v in numbers.items()}
    more = {name: means[name][0] - means[name][1] for name in ("computing", "input", "busy")}
    if more["input"] > 0.5 * more["busy"]:
        here, there = map(duration, means["input"])
        return f", for their input: {here} a step, against {there} of the others"
    if more["computing"] < 0.5 * more["busy"]:
        rest = duration(more["busy"] - more["computing"] - more["input"])
        return f", which spent {rest} a step more on neither computing nor input (the script's own code, a compiler)"
    larger = means["size"][0] / means["size"][1]
    slower = means["computing"][0] / means["computing"][1] / larger
    reasons = [f"an example took {slower:.1f} times as long"] if slower >= 1.1 else []
    reasons += [f"{larger:.1f} times as many examples"] if larger >= 1.1 else []
    return f": {listed(reasons)}" if reasons else ""


# --- slow workers ---------------------------------------------------------------------------------------------------


class SlowPhase(NamedTuple):
    """Workers for which the others waited."""

    workers: list[int]
    first: int  # row
    end: int  # the row after the last one
    saved: float  # seconds that the run would have been shorter with them as fast as the median of the others


_WINDOWS = 40
_SLOWER = 0.1  # of the step: the least excess over the median of the others
_ERRORS = 4.0  # standard errors that the excess must exceed, so that chance alone names nobody


def slow_phases(run: Columns) -> list[SlowPhase]:
    """Return the workers that were steadily slower than most, and when, the costliest first.

    In 40 windows, a slow worker is busier than the median one by a tenth of the step and by four standard errors.
    Windows in a row, and workers that are slow in the same windows, are one phase.
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
