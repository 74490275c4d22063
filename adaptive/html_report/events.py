"""What changed in a run, when and why: batch sizes, workers, hyperparameters; restores, skipped steps, notes."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from adaptive.observe.scalars import counted, listed, request_in_words, sizes_in_words

from .columns import Columns
from .formatting import duration, workers

_FOLD = 4  # at least so many consecutive changes of one kind share a line


class RunEvent(NamedTuple):
    """One line of the list of changes."""

    row: int  # of the first step that it affected
    kind: str  # "size", "hyperparameter", "joined", "left", "lost", "restored", "skipped", "stop" or "note"
    what: str  # what changed
    why: str = ""  # its cause, if it is known
    by: str = ""  # who requested it; consecutive changes of one kind by one hook share a line
    before: str = ""
    after: str = ""

    @property
    def text(self) -> str:
        """What changed, from which value to which."""
        return f"{self.what}: {self.before} → {self.after}" if self.after else self.what


def run_events(run: Columns) -> list[RunEvent]:
    """Return the events in the order of steps. Four or more of one kind and by one hook are one event, unless a worker
    joined, left or was lost between them, or a checkpoint was restored.
    """
    found = [*_come_and_gone(run), *_changed(run), *_restored(run), *_stops(run)]
    found += _skipped_or_noted(run, "\n".join(event.what + event.why for event in found))
    found.sort(key=lambda event: event.row)
    groups: dict[tuple[int | str, ...], list[RunEvent]] = {}
    apart = 0
    for event in found:
        apart += event.kind in ("joined", "left", "lost", "restored")
        groups.setdefault((apart, event.kind, event.what, event.by), []).append(event)
    folded = [[_folded(run, group)] if len(group) >= _FOLD else group for group in groups.values()]
    return sorted((event for group in folded for event in group), key=lambda event: event.row)


def _folded(run: Columns, group: Sequence[RunEvent]) -> RunEvent:
    first, last = group[0], group[-1]
    what = f"{first.what}, {len(group):,} times up to step {run.step[last.row]:,}"
    return first._replace(what=what, why=first.by or first.why, after=last.after)


def hook_summary(run: Columns) -> list[str]:
    """Return a sentence per hook: how often it made requests, or why it never did."""
    made = Counter(request.by for request in run.requests)
    return [_of_hook(run, hook, made) for hook in run.record.header["hooks"]]


def _of_hook(run: Columns, hook: Mapping[str, Any], made: Mapping[str, int]) -> str:
    name, every = hook["name"].partition("/")[2] or hook["name"], hook["every"]
    due = (run.step % every == 0) & ~run.skipped
    calls = counted(int(due.sum()), "call")
    if made.get(name):
        changed = len(run.resized) or any(len(_changes(values)) for values in run.hyperparameters.values())
        nothing = ", but nothing has changed: its sizes have no kernels yet, or are those in use"
        return f"{name} made {counted(made[name], 'request')} in {calls}{'' if changed else nothing}."
    if not due.any():
        return f"{name} never acted: it is called every {counted(every, 'step')}, and was not due."
    columns = [run.record[f"hook/{hook['name']}/{leaf}"][due] for leaf in hook["leaves"]]
    unknown = sum(all(np.isnan(value).all() for value in row) for row in zip(*columns, strict=True))
    missing = f", in {unknown:,} of them without measurements (all values NaN)" if unknown else ""
    why = next((each[hook["name"]] for each in reversed(run.record["why"]) if each and hook["name"] in each), "")
    return f"{name} never acted: no request in {calls}{missing}{f'. {why[:1].upper()}{why[1:]}' if why else ''}."


def _changes(values: np.ndarray) -> np.ndarray:
    """Return the rows whose value differs from that of the row before."""
    same = [np.array_equal(a, b, equal_nan=True) for a, b in zip(values[1:], values[:-1], strict=True)]
    return np.flatnonzero(~np.array(same, bool)) + 1


# --- requests ---------------------------------------------------------------------------------------------------------


def _is_about(name: str, wish: Mapping[str, Any]) -> bool:
    """Return whether a request sets a hyperparameter; or for "", batch sizes or workers."""
    if name:
        return name in (wish.get("hyperparameters") or {})
    return any(wish.get(field) is not None for field in ("global_batch", "shares", "workers"))


def _cause(run: Columns, since: int, row: int, name: str) -> tuple[str, str]:
    """Return who made the last requests of a kind (`_is_about`) after the steps from row `since` to before `row`; and
    what for, with the notes of that step.
    """
    within = run.requests[bisect_left(run.requests, (since,)) : bisect_left(run.requests, (row,))]
    about = [request for request in within if _is_about(name, request.wish)]
    last = about[-1].row if about else -1
    found = [request for request in about if request.row == last]
    texts = [f"{each.by}, after step {run.step[last]:,}: {request_in_words(each.wish)}" for each in found]
    notes = (run.record["notes"][last] or ()) if found else ()
    return listed([each.by for each in found]), "; ".join([*texts, *notes])


# --- sizes, hyperparameters -------------------------------------------------------------------------------------------


def _changed(run: Columns) -> Iterator[RunEvent]:
    """Yield the changes of batch sizes and of hyperparameters."""
    rows = {"": run.resized} | {name: _changes(values) for name, values in run.hyperparameters.items()}
    for name, changes in rows.items():
        for since, row in pairwise([0, *changes.tolist()]):
            by, why = _cause(run, since, row, name)
            before, after = (run.hyperparameters[name] if name else run.sizes)[[row - 1, row]]
            if name:
                yield RunEvent(row, "hyperparameter", name, why, by, _shown(before), _shown(after))
            else:
                what = "Split" if before.sum() == after.sum() else "Batch sizes"
                yield RunEvent(row, "size", what, why, by, sizes_in_words(before), sizes_in_words(after))


def _shown(value: Any) -> str:
    return np.array2string(np.asarray(value, float), formatter={"float_kind": "{:.4g}".format})


# --- workers, restores, skipped steps, notes --------------------------------------------------------------------------


def _come_and_gone(run: Columns) -> Iterator[RunEvent]:
    columns = (run.record[name] for name in ("members", "joined", "lost", "notes"))
    before: set[int] = set()
    for row, (members, joined, lost, notes) in enumerate(zip(*columns, strict=True)):
        why = " ".join(note for note in notes or () if note not in (lost or ()))
        if joined:
            yield RunEvent(row, "joined", f"{workers(joined).capitalize()} joined", why)
        if lost:
            took, usual = duration(float(run.seconds[row])), duration(float(np.median(run.seconds)))
            cost = f"step {run.step[row]:,} took {took}, repair included; the median step took {usual}"
            what = " ".join(text[:1].upper() + text[1:] for text in lost)
            yield RunEvent(row, "lost", what, cost)
        gone = before - set(members or before)
        if gone and not lost:
            yield RunEvent(row, "left", f"{workers(sorted(gone)).capitalize()} left", why)
        before = set(members or before)


def _restored(run: Columns) -> Iterator[RunEvent]:
    for row in map(int, np.flatnonzero(run.record["restores"])):
        times, repeated = int(run.record["restores"][row]), int(run.record["repeated"][row])
        what = f"Restored{f' {times:,} times' if times > 1 else ''} at step {run.step[row] - 1:,}"
        yield RunEvent(row, "restored", what, f"{counted(repeated, 'step')} taken again" if repeated else "")


def _stops(run: Columns) -> list[RunEvent]:
    stops = [request for request in run.requests if request.wish.get("stop")]
    return [RunEvent(request.row, "stop", "Stop of the run", f"{request.by} asked for it") for request in stops]


def _skipped_or_noted(run: Columns, listed_already: str) -> Iterator[RunEvent]:
    """Yield skipped steps with their notes, and the notes of other steps that are not in the text `listed_already`."""
    for row, notes in enumerate(run.record["notes"]):
        if run.skipped[row]:
            yield RunEvent(row, "skipped", "Step skipped", " ".join(notes or ("the driver kept its state",)))
        else:
            new = (note for note in notes or () if note[1:] not in listed_already)
            yield from (RunEvent(row, "note", note[:1].upper() + note[1:]) for note in new)
