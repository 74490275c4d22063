"""Sentences on where a run lost time: which worker the others waited for, the parts of a step, single long steps.

The statistic is a worker's busy time minus the median of the others, with its sign. Random differences between workers
are negative as often as positive, and cancel. So a sentence names only a worker that is slower *steadily*.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from .columns import Columns
from .formatting import counted, duration, listed, number, percent, workers
from .intervals import Interval, intervals

SLOWER = 0.1  # least share of the time that others wait for a worker
EARLY = 0.2  # least share of the time that a worker waits for most of the others
UNEVEN = 0.15  # least share of the time that workers wait for one another, if none is steadily slower
HIGH = {"input": 0.2, "exchanging": 0.3, "hooks": 0.1, "other": 0.25}  # least shares of a step's time
LONG = 5.0  # a long step takes more than this many times the median of nearby steps
_AROUND = 50  # steps per block; that median is taken over a block and its two neighbors
_LEAST_COST = 0.01  # findings that cost a smaller share of the run are left out
_MOST = 20  # largest number of findings of one kind
_LONG_SHOWN = 5
_LOOKED_AT = 2000  # largest number of rows that are examined for the cause of an interval
_SAME = 0.7  # least common share of intervals of two workers that share a sentence
_WORDS = {
    "input": "Input was {share} of the step {when}",
    "exchanging": "Exchanging took {share} of the step {when}",
    "hooks": "Control hooks took {share} of the step {when}",
    "other": "Other work (this library, Python) took {share} of the step {when}",
}
_ADVICE = {
    "input": " Read examples in reader processes, or make them cheaper.",
    "exchanging": " A larger batch has fewer exchanges for its examples.",
    "hooks": " A larger every= calls a hook less often.",
    "other": "",
}
_LONG_BY = {
    "input": "input",
    "computing": "computing",
    "exchanging": "exchange",
    "waiting": "waiting for other workers",
    "hooks": "hooks",
    "compiling": "a compiler",
    "other": "other things",
}


class Finding(NamedTuple):
    """One sentence of the report, with its cost.

    Attributes:
      text: one or two sentences.
      seconds: the time that it cost.
      first: the first row of the record that it is about.
      end: the row after its last one.
    """

    text: str
    seconds: float
    first: int
    end: int


def findings(run: Columns) -> list[Finding]:
    """Return all findings that cost at least a hundredth of the run, most expensive first."""
    found = list(_compiling(run)) + list(_long_steps(run))
    if run.workers:
        found += list(_of_workers(run))
    found += list(_parts(run))
    total = float(run.seconds.sum())
    return sorted((f for f in found if f.seconds >= _LEAST_COST * total), key=lambda f: -f.seconds)


def when(run: Columns, first: int, end: int) -> str:
    """Format an interval: "from step 400 to 900", or "throughout"."""
    if end - first >= 0.97 * len(run):
        return "throughout"
    return f"from step {run.step[first]:,} to {run.step[end - 1]:,}"


def _whens(run: Columns, found: Sequence[Interval]) -> str:
    """Describe the longest of several intervals."""
    longest = sorted(sorted(found, key=lambda interval: interval.first - interval.end)[:_LONG_SHOWN])
    texts = [when(run, interval.first, interval.end) for interval in longest]
    more = f", and in {counted(len(found) - len(longest), 'shorter interval', 'shorter intervals')}"
    return listed([texts[0], *(t.removeprefix("from step ") for t in texts[1:])]) + more * (len(found) > len(longest))


# --- of the workers ---------------------------------------------------------------------------------------------------


def medians(values: np.ndarray, axis: int) -> np.ndarray:
    """Return the median of the finite values, NaN where there are none; of an even number, the lower middle value."""
    ordered = np.sort(values, axis=axis)  # NaNs come last
    middle = np.maximum((np.isfinite(values).sum(axis, keepdims=True) - 1) // 2, 0)
    return np.take_along_axis(ordered, middle, axis).squeeze(axis)


def waiting(busy: np.ndarray) -> np.ndarray:
    """Return the seconds that each worker waited for the last one; shape=(T, n), NaN for an empty slot."""
    return np.fmax.reduce(busy, axis=1, keepdims=True) - busy


def periods(run: Columns) -> np.ndarray:
    """Return the seconds from step to step; shape=(T,). They include the script's own code between steps."""
    return np.fmax(run.seconds, np.nan_to_num(np.fmax.reduce(run.workers["busy"], axis=1)))


def excess(busy: np.ndarray) -> np.ndarray:
    """Return each worker's busy time minus the median of the others; shape=(T, n), NaN for an empty slot or a single
    worker.
    """
    ordered = np.sort(busy, axis=1)  # NaNs come last
    count = np.isfinite(busy).sum(1)
    rows = np.arange(len(busy))
    middle = np.maximum((count - 2) // 2, 0)  # the others' median; the lower middle value of an even number
    lower, upper = ordered[rows, middle], ordered[rows, np.minimum(middle + 1, busy.shape[1] - 1)]
    others = np.where(busy <= lower[:, None], upper[:, None], lower[:, None])
    return np.where(count[:, None] > 1, busy - others, np.nan)


class _Slow(NamedTuple):
    """Workers for which the others waited, in an interval."""

    worker_slots: list[int]
    interval: Interval


def _of_workers(run: Columns) -> Iterable[Finding]:
    busy = run.workers["busy"]
    if run.n < 2 or len(run) < 2:
        return
    period = periods(run)
    usual = np.minimum(period, LONG * np.median(period))  # single long steps have a sentence of their own
    shares = excess(busy) / np.maximum(period, 1e-9)[:, None].astype(np.float32)
    slow = _together([(w, s) for w in range(run.n) for s in intervals(shares[:, w], SLOWER)])
    count = np.isfinite(busy).sum(1)
    waits = np.nansum(waiting(busy), axis=1) / np.maximum(count, 1) / np.maximum(period, 1e-9)
    dear = sorted(slow, key=lambda s: -s.interval.level * usual[s.interval.first : s.interval.end].sum())
    for worker_slots, (first, end, level) in dear[:_MOST]:
        rows = slice(first, end)
        alone = np.clip(1 - len(worker_slots) / np.maximum(count[rows], 1), 0.0, 1.0)
        waits[rows] -= level * alone
        text = (
            f"{workers(worker_slots).capitalize()} made the others wait "
            f"{percent(level)} of the time {when(run, first, end)}{_why(run, worker_slots, first, end)}"
            f"{_what_if(busy[rows], worker_slots, float(period.sum()))}"
        )
        yield Finding(text, level * float(usual[rows].sum()), first, end)
    early = _together([(w, s) for w in range(run.n) for s in intervals(-shares[:, w], EARLY)]) if run.n > 2 else []
    for worker_slots, (first, end, level) in [
        e for e in early if not any(_cover(s.interval, e.interval) for s in slow)
    ][:_MOST]:
        rows, share = slice(first, end), len(worker_slots) / run.n
        waits[rows] -= level * share
        text = (
            f"{workers(worker_slots).capitalize()} finished early, and waited "
            f"{percent(level)} of the time {when(run, first, end)}. ctrl.balance() would give "
            "more examples to faster workers."
        )
        yield Finding(text, level * share * float(usual[rows].sum()), first, end)
    for first, end, level in intervals(waits, UNEVEN):
        text = (
            f"Workers waited for one another {percent(level)} of the time {when(run, first, end)}, now for one and now "
            f"for another{_uneven_by(run, first, end)}. None of them was steadily slower than most."
        )
        yield Finding(text, level * float(usual[first:end].sum()), first, end)


def _cover(one: Interval, other: Interval) -> bool:
    """Return whether more than half of `other` lies in `one`."""
    return 2 * (min(one.end, other.end) - max(one.first, other.first)) > other.end - other.first


def _together(found: Sequence[tuple[int, Interval]]) -> list[_Slow]:
    """Group workers that were slow at the same time, as workers of one host are, for one sentence."""
    groups: list[_Slow] = []
    for slot, interval in found:
        for number_, (worker_slots, other) in enumerate(groups):
            common = min(interval.end, other.end) - max(interval.first, other.first)
            longest = max(interval.end - interval.first, other.end - other.first)
            if common >= _SAME * longest and 0.5 < interval.level / other.level < 2 and slot not in worker_slots:
                level = max(interval.level, other.level)
                both = Interval(min(interval.first, other.first), max(interval.end, other.end), level)
                groups[number_] = _Slow([*worker_slots, slot], both)
                break
        else:
            groups.append(_Slow([slot], interval))
    return groups


def _why(run: Columns, worker_slots: list[int], first: int, end: int) -> str:
    """Return the reason why workers were slow: speed, number of examples, input, or something else."""
    rows = slice(first, end, max(1, (end - first) // _LOOKED_AT))
    others = [w for w in range(run.n) if w not in worker_slots]
    size = np.where(run.sizes[rows] > 0, run.sizes[rows], np.nan)
    of_each = {name: medians(column[rows], 0) for name, column in run.workers.items()}
    of_each |= {"size": medians(size, 0), "an example": medians(run.workers["computing"][rows] / size, 0)}
    mine, theirs = (
        {name: float(medians(values[who], 0)) for name, values in of_each.items()} for who in (worker_slots, others)
    )
    more = {name: mine[name] - theirs[name] for name in ("computing", "input")}
    more["rest"] = mine["busy"] - theirs["busy"] - sum(more.values())
    it, its, them = ("it", "its", "it") if len(worker_slots) == 1 else ("they", "their", "them")
    worst = max(more, key=lambda name: more[name])
    if worst == "input":
        return (
            f": {it} waited {duration(mine['input'])} a step for {its} input, the others {duration(theirs['input'])}."
        )
    if worst == "rest":
        return (
            f": {it} spent {duration(more['rest'])} a step more than the others on neither computing nor input "
            "(a compiler, or the script's own code between steps)."
        )
    slower, larger = mine["an example"] / theirs["an example"], mine["size"] / theirs["size"]
    reasons = []
    if slower >= 1.1:
        reasons.append(f"an example took {them} {slower:.1f} times as long")
    if larger >= 1.1:
        reasons.append(f"{it} had {larger:.1f} times as many examples")
    return f": {listed(reasons)}." if reasons else "."


def _what_if(busy: np.ndarray, worker_slots: list[int], total: float) -> str:
    """Return how much less time the run would have taken if these workers had been as fast as the median of the others.

    Args:
      busy: seconds of each worker in the steps of the slow phase; shape=(T, n).
      total: seconds of the run.
    """
    others = np.delete(busy, worker_slots, axis=1)
    if not others.shape[1]:
        return ""
    usual = medians(others, 1)
    healed = busy.copy()
    healed[:, worker_slots] = np.fmin(busy[:, worker_slots], usual[:, None])
    saved = float(np.nansum(np.fmax.reduce(busy, axis=1) - np.fmax.reduce(healed, axis=1)))
    if saved < _LEAST_COST * total:
        return ""
    who = "it" if len(worker_slots) == 1 else "them"
    less = f"{duration(saved)} ({percent(saved / total)})"
    return f" With {who} as fast as the others, the run would have taken {less} less."


def _uneven_by(run: Columns, first: int, end: int) -> str:
    """Return why steps were uneven: the main reason of the last worker of each step."""
    rows = slice(first, end, max(1, (end - first) // _LOOKED_AT))
    busy = np.nan_to_num(run.workers["busy"][rows])
    last = busy.argmax(1)[:, None]
    more = {"busy": 0.0, "input": 0.0, "computing": 0.0}
    for name in more:
        column = run.workers[name][rows]
        mine = np.take_along_axis(column, last, 1)[:, 0]
        more[name] = float(np.nan_to_num(mine - medians(column, 1)).sum())
    if more["input"] > 0.5 * more["busy"]:
        return ", because of their input, which took some longer than others"
    if more["computing"] > 0.5 * more["busy"]:
        return ", because their computing is uneven"
    return ""


# --- of the steps -----------------------------------------------------------------------------------------------------


def _parts(run: Columns) -> Iterable[Finding]:
    if run.breakdown is None:
        return
    seconds = np.maximum(run.seconds, 1e-9)
    usual = np.minimum(seconds, LONG * np.median(seconds))
    for part, threshold in HIGH.items():
        if part not in run.parts:
            continue
        share = run.breakdown[:, run.parts.index(part)] / seconds
        if part == "input" and run.workers:
            share = np.nan_to_num(medians(run.workers["input"], 1)) / np.maximum(periods(run), 1e-9)
        found = intervals(share, threshold)
        if not found:
            continue
        levels = sorted(interval.level for interval in found)
        level_text = percent(levels[0]) if len(found) == 1 else f"{100 * levels[0]:.0f} to {percent(levels[-1])}"
        text = _WORDS[part].format(share=level_text, when=_whens(run, found)) + "." + _ADVICE[part]
        lost = sum(level * float(usual[first:end].sum()) for first, end, level in found)
        yield Finding(text, lost, found[0].first, found[-1].end)


def _compiling(run: Columns) -> Iterable[Finding]:
    if run.breakdown is None or "compiling" not in run.parts:
        return
    seconds = run.breakdown[:, run.parts.index("compiling")]
    total = float(seconds.sum())
    if not total:
        return
    rows = np.flatnonzero(seconds > 1e-3)
    first = float(seconds[0])
    if total - first < 0.02 * total:
        where = f"all of it in step {run.step[0]:,}"
    else:
        begun = f"{duration(first)} of it in step {run.step[0]:,} and the rest" if first > 0.02 * total else "all of it"
        later = rows[rows > 0]
        where = f"{begun} in {counted(len(later), 'step')} up to step {run.step[later[-1]]:,}" if len(later) else begun
    yield Finding(
        f"Steps waited for a compiler for {duration(total)}, {where}.", total, int(rows[0]), int(rows[-1]) + 1
    )


def _long_steps(run: Columns) -> Iterable[Finding]:
    if len(run) < 2 * LONG:
        return
    compiling = 0.0 if run.breakdown is None else run.breakdown[:, run.parts.index("compiling")]
    seconds = np.maximum(run.seconds - compiling, 0.0)  # compiling has a sentence of its own
    around = _medians_around(seconds)
    rows = np.flatnonzero(seconds > LONG * np.maximum(around, 1e-9))
    lost = float((seconds - around)[rows].sum())
    if not len(rows):
        return
    longest = rows[np.argsort(-seconds[rows])][:_LONG_SHOWN]
    named = [f"step {run.step[row]:,} ({duration(float(run.seconds[row]))}{_by(run, row)})" for row in longest]
    more = f"; the longest were {listed(named)}" if len(rows) > len(named) else f": {listed(named)}"
    steps = counted(len(rows), "step")
    text = f"{steps[0].upper()}{steps[1:]} took more than {LONG:.0f} times as long as nearby steps{more}."
    yield Finding(text, lost, int(rows[0]), int(rows[-1]) + 1)


def _medians_around(seconds: np.ndarray) -> np.ndarray:
    """Return the median duration of the steps around each step; shape=(T,)."""
    begins = np.arange(0, len(seconds), _AROUND)
    medians = np.array([np.median(seconds[max(b - _AROUND, 0) : b + 2 * _AROUND]) for b in begins])
    return np.repeat(medians, _AROUND)[: len(seconds)]


def _by(run: Columns, row: int) -> str:
    """Return why a step was long: a loss, joining workers, or its largest part."""
    notice = next((notice for notice in run.notices if notice.row == row and (notice.lost or notice.joined)), None)
    if notice is not None:
        return ", in which a worker was lost" if notice.lost else f", in which {workers(notice.joined)} joined"
    if run.breakdown is None:
        return ""
    part = run.parts[int(run.breakdown[row].argmax())]
    return f", {_LONG_BY.get(part, part)}"


def where_it_went(run: Columns) -> str:
    """Return the shares of the time by cause; "" if the record has no breakdown."""
    if run.breakdown is None:
        return ""
    total = run.breakdown.sum(0, dtype=np.float64)
    order = np.argsort(-total)
    shares = [(run.parts[i], total[i] / max(total.sum(), 1e-9)) for i in order]
    parts = [f"{percent(share)} {name}" for name, share in shares if share >= 0.01]
    return listed(parts)


def speed(run: Columns) -> str:
    """Return the examples per second of the run."""
    return number(float(f"{run.global_batch.sum() / max(float(run.seconds.sum()), 1e-9):.3g}"))
