"""The events of a run and their causes: new batch sizes, joins, leaves, losses, restores, skipped steps, notes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .columns import Columns, Notice
from .formatting import counted, duration, listed, workers
from .requests import (
    FEW,
    HookRequest,
    asked,
    asks_for_more,
    hooks_behind,
    is_about_sizes,
    moved_in_words,
    wish_in_words,
)

_FOLD = 4  # at least so many consecutive adjustments of one kind share a line
_MOST = 300  # lines of the list
_SKIPPED = "skipped: "  # how notes on a skipped step begin, as `adaptive.program.step_checks.SkippedSteps` writes them
_LOST = re.compile(r"workers? (\d+(?:, \d+)*) lost")  # as `adaptive.base.world.Loss` is written


class RunEvent(NamedTuple):
    """One line of the report's list of events.

    Attributes:
      row: the row of the first step that it affected.
      kind: "size", "joined", "left", "lost", "restored", "skipped", "note", "asked" or "stop".
      what: the event, as text.
      why: its cause, as text; may be empty.
    """

    row: int
    kind: str
    what: str
    why: str


class _Resize(NamedTuple):
    """A change of batch sizes."""

    row: int
    before: np.ndarray
    after: np.ndarray
    by: str  # the cause, as text
    kind: str  # hooks and whether the global batch stayed: consecutive changes of one kind share a line


def run_events(run: Columns) -> tuple[list[RunEvent], int]:
    """Return the events in the order of steps, and the number of events left out, the least important ones."""
    lines = [*_resized(run), *_come_and_gone(run), *_restored(run), *_skipped(run), *_unfulfilled(run)]
    lines.sort(key=lambda change: (change.row, change.kind == "size"))
    left_out = max(len(lines) - _MOST, 0)
    if left_out:
        first = dict.fromkeys(("lost", "restored", "joined", "left", "stop"), 0)
        rank = {**first, "size": 1, "asked": 2, "skipped": 2, "note": 3}
        keep = sorted(range(len(lines)), key=lambda i: (rank[lines[i].kind], i))[:_MOST]
        lines = [lines[i] for i in sorted(keep)]
    return lines, left_out


def hook_summary(run: Columns) -> list[str]:
    """Return a sentence per hook: how often it made requests, and how many of them were new."""
    times, new = Counter[str](), Counter[str]()
    for notice in run.notices:
        for request in asked(run, notice):
            times[request.by] += 1
            new[request.by] += asks_for_more(request.wish, notice.asked or {})
    return [
        f"{by} made {counted(times[by], 'request')}"
        + (f", {new[by]:,} of them for a change" if new[by] < times[by] else "")
        + "."
        for by in times
    ] + [_never(run, name, every) for name, every in _hooks(run) if name not in times]


def _hooks(run: Columns) -> list[tuple[str, int]]:
    return [(hook["name"].partition("/")[2] or hook["name"], hook["every"]) for hook in run.header["hooks"]]


def _never(run: Columns, name: str, every: int) -> str:
    due = (run.step % every == 0) & ~run.skipped
    text = f"{name} made no request in {counted(int(due.sum()), 'call')}"
    unknown = int((run.unknown[name] & due).sum()) if name in run.unknown else 0
    return f"{text}, {unknown:,} of them without measurements (its values were NaN)." if unknown else f"{text}."


def sizes_in_words(sizes: Sequence[int] | np.ndarray) -> str:
    """Format batch sizes: "64 + 32 + – = 96"; "2,048 = 64 workers of 28 to 36" for many workers."""
    some = [int(size) for size in sizes if size]
    if len(sizes) == 1:
        return f"{sum(some):,}"
    if len(sizes) <= FEW:
        return " + ".join(f"{int(size):,}" if size else "–" for size in sizes) + f" = {sum(some):,}"
    if not some:
        return "none"
    each = f"{min(some):,}" if min(some) == max(some) else f"{min(some):,} to {max(some):,}"
    return f"{sum(some):,} = {counted(len(some), 'worker')} of {each}"


# --- sizes ------------------------------------------------------------------------------------------------------------


def _resized(run: Columns) -> Iterator[RunEvent]:
    resizes = list(_resizes(run))
    begin = 0
    while begin < len(resizes):
        end = begin + 1
        while end < len(resizes) and resizes[end].kind == resizes[begin].kind:
            end += 1
        alike = resizes[begin:end]
        if alike[0].kind and len(alike) >= _FOLD:
            yield _folded(run, alike)
        else:
            yield from (_line(resize) for resize in alike)
        begin = end


def _resizes(run: Columns) -> Iterator[_Resize]:
    """Yield the changes of batch sizes, each with the last request of sizes since the change before, and with the
    workers that joined, left or were lost.
    """
    notices, moves, last = iter(run.notices), {move.row: move for move in _moves(run)}, None
    following = next(notices, None)
    for i in range(1, len(run.changes)):
        row, before, sizes = int(run.changes[i]), run.changed[i - 1], run.changed[i]
        while following is not None and following.row < row:
            last = _later(last, following)
            following = next(notices, None)
        reasons, kind, requests = list[str](), "", list[HookRequest]()
        if last is not None:
            requests = [each for each in asked(run, last) if is_about_sizes(each.wish)]
            after_step = f"after step {run.step[last.row]:,}"
            reasons = [f"{each.by}, {after_step}: {wish_in_words(each.wish)}" for each in requests]
        if row in moves:
            reasons.append(moves[row].why)
        elif requests:
            kind = f"{listed([each.by for each in requests])} {before.sum() == sizes.sum()}"
        yield _Resize(row, before, sizes, "; ".join(reasons), kind)
        last = None


def _later(last: Notice | None, notice: Notice) -> Notice | None:
    """Return the notice whose request explains a change after both: the later one about sizes. One for a number of
    workers alone does not replace one for a batch or a split.
    """
    new, old = notice.decision or {}, (last and last.decision) or {}
    if not is_about_sizes(new):
        return last
    splits = [any(wish.get(name) is not None for name in ("global_batch", "shares")) for wish in (new, old)]
    return last if splits == [False, True] else notice


def _line(resize: _Resize) -> RunEvent:
    what = f"{sizes_in_words(resize.before)} → {sizes_in_words(resize.after)}"
    if len(resize.before) > FEW and resize.before.sum() == resize.after.sum():
        what = f"{_moved(resize)}, of {resize.after.sum():,}"
    return RunEvent(resize.row, "size", f"Batch sizes: {what}", resize.by)


def _moved(resize: _Resize) -> str:
    by_worker = resize.after - resize.before
    most = int(np.abs(by_worker).argmax())
    moved = int(np.abs(by_worker).sum()) // 2
    at_most = f"worker {most} {resize.before[most]} → {resize.after[most]}"
    return f"{counted(moved, 'example')} moved between workers (most: {at_most})"


def _folded(run: Columns, alike: Sequence[_Resize]) -> RunEvent:
    first, last = alike[0], alike[-1]
    by = first.kind.rpartition(" ")[0]
    when = f"{len(alike):,} changes up to step {run.step[last.row]:,}"
    if first.kind.endswith("True"):
        largest = max(alike, key=lambda resize: int(np.abs(resize.after - resize.before).sum()))
        most = f"in the largest, in step {run.step[largest.row]:,}, {_moved(largest)}"
        what = f"Batch sizes: {when}, of the split alone; {most}"
        ends = f"; {sizes_in_words(first.before)} → {sizes_in_words(last.after)}"
        return RunEvent(first.row, "size", what + ends, by)
    through = [first.before, *(resize.after for resize in alike)]
    totals = [int(sizes.sum()) for sizes in through]
    if len(totals) > 12:
        totals = [*totals[:6], -1, *totals[-5:]]
    path = " → ".join("…" if total < 0 else f"{total:,}" for total in totals)
    return RunEvent(first.row, "size", f"Batch sizes: {when}: {path}; in the end {sizes_in_words(last.after)}", by)


# --- requests ---------------------------------------------------------------------------------------------------------


def _unfulfilled(run: Columns) -> Iterator[RunEvent]:
    """Yield the requests that were not in effect at the end, and the request to stop."""
    for notice in run.notices:
        for request in asked(run, notice):
            if request.wish.get("stop"):
                yield RunEvent(notice.row, "stop", "Stop of the run", f"{request.by} asked for it")
    for step, wish in _waiting(run):
        row = int(np.searchsorted(run.step, step))
        what = f"Request for, and not there by the end: {wish_in_words(wish)}"
        yield RunEvent(min(row, len(run) - 1), "asked", what, wish["hook"])


def _waiting(run: Columns) -> list[tuple[int, dict[str, Any]]]:
    """Return the last decision if sizes have not changed since."""
    last = next((notice for notice in reversed(run.notices) if notice.decision), None)
    if last is None or not last.decision or not last.asked or last.row >= len(run) - 1 or run.changes[-1] > last.row:
        return []
    wish = {**last.decision, "hook": hooks_behind(run, last)}
    new = wish.get("global_batch") not in (None, last.asked.get("global_batch"))
    return [(int(run.step[last.row]), wish)] if new else []


# --- joins, leaves, losses, restores, skipped steps, notes ------------------------------------------------------------


class _Move(NamedTuple):
    """Workers that joined, left or were lost between two steps."""

    row: int
    joined: tuple[int, ...]
    lost: tuple[str, ...]
    left: tuple[int, ...]

    @property
    def why(self) -> str:
        """A short description, such as "worker 2 joined"."""
        return moved_in_words(self.joined, self.left, [slot for text in self.lost for slot in _lost_worker_slots(text)])


def _moves(run: Columns) -> Iterator[_Move]:
    by_row = {notice.row: notice for notice in run.notices if notice.joined or notice.lost}
    others = dict(run.members[1:])
    before = {row: set(members) for (row, _), (_, members) in zip(run.members[1:], run.members[:-1], strict=True)}
    for row in sorted(by_row.keys() | others.keys()):
        joined, lost = (by_row[row].joined, by_row[row].lost) if row in by_row else ((), ())
        gone = before[row] - set(others[row]) if row in others else set()
        left = gone - {slot for text in lost for slot in _lost_worker_slots(text)}
        yield _Move(row, joined, lost, tuple(sorted(left)))


def _lost_worker_slots(text: str) -> list[int]:
    """Return the workers of the text of a loss: "workers 1, 2 lost: rank 1 (…"."""
    found = _LOST.match(text)
    return [int(slot) for slot in found[1].split(",")] if found else []


def _come_and_gone(run: Columns) -> Iterator[RunEvent]:
    for move in _moves(run):
        if move.joined:
            yield RunEvent(move.row, "joined", f"{workers(move.joined).capitalize()} joined", "")
        if move.left:
            yield RunEvent(move.row, "left", f"{workers(move.left).capitalize()} left", "")
        for text in move.lost:
            yield RunEvent(move.row, "lost", text[:1].upper() + text[1:], _cost_of_loss(run, move.row))
    for notice in run.notices:
        already_listed = {*notice.lost, *(notice.decision or {}).get("notes", ())}
        for note in notice.notes:
            if note not in already_listed and "has joined in worker slot" not in note and not note.startswith(_SKIPPED):
                yield RunEvent(notice.row, "note", note[:1].upper() + note[1:], "")


def _cost_of_loss(run: Columns, row: int) -> str:
    """Describe the cost of a loss: detection, repair and the repeated step."""
    took, usual = duration(float(run.seconds[row])), duration(float(np.median(run.seconds)))
    return f"step {run.step[row]:,} took {took}, repair and retry included; the median step took {usual}"


def _restored(run: Columns) -> Iterator[RunEvent]:
    """Yield the restores, those of one step in one line."""
    for row, after, restores, repeated in run.restored:
        times = f"{restores:,} times " if restores > 1 else ""
        cost = f"{counted(repeated, 'step')} discarded" if repeated else ""
        yield RunEvent(row, "restored", f"Restored {times}at step {after:,}", cost)


def _skipped(run: Columns) -> Iterator[RunEvent]:
    """Yield the skipped steps, consecutive ones in one line, with the notes on the reason only."""
    rows = np.flatnonzero(run.skipped)
    notes = {notice.row: [note for note in notice.notes if note.startswith(_SKIPPED)] for notice in run.notices}
    groups = _beside(rows)
    if len(groups) > _FOLD:
        lengths = f", in {len(groups):,} places" if len(rows) > len(groups) else ", one here and one there"
        groups, more = [rows], lengths
    else:
        more = ""
    for group in groups:
        first, last = int(group[0]), int(group[-1])
        what = f"{counted(len(group), 'step')} skipped{more}"
        what += f", up to step {run.step[last]:,}" if last > first else ""
        why: Iterable[Any] = dict.fromkeys(note for row in group for note in notes.get(int(row), ()))
        yield RunEvent(first, "skipped", what, " ".join(list(why)[:3]))


def _beside(rows: np.ndarray) -> list[np.ndarray]:
    return np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1) if len(rows) else []
