"""What changed in a run, when and why: batch sizes and whose wish it was, who came and who went, what was skipped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .columns import Columns, Told
from .words import counted, listed, workers

_FEW = 8  # workers whose sizes are told one by one
_FOLD = 4  # adjustments of one kind, one behind another, are told in one line from so many on
_MOST = 300  # lines
_LOST = re.compile(r"workers? (\d+(?:, \d+)*) lost")  # as `adaptive.base.world.Loss` is written


class Change(NamedTuple):
    """One line of the list.

    Attributes:
      row: of the step from which on it held.
      kind: "size", "joined", "left", "lost", "skipped", "note", "asked" or "stop".
      what: in words.
      why: in words; "" where it speaks for itself.
    """

    row: int
    kind: str
    what: str
    why: str


class _Resize(NamedTuple):
    """Other batch sizes than in the step before."""

    row: int
    before: np.ndarray
    behind: np.ndarray
    by: str  # whose wish it was, in words
    kind: str  # whose, and whether the global batch stayed: what is told in one line has the same


def changes(run: Columns) -> tuple[list[Change], int]:
    """The list, in the order of steps; and how many lines were left out, of the least important."""
    lines = [*_resized(run), *_come_and_gone(run), *_skipped(run), *_not_carried_out(run)]
    lines.sort(key=lambda change: (change.row, change.kind == "size"))
    left_out = max(len(lines) - _MOST, 0)
    if left_out:
        rank = {"lost": 0, "joined": 0, "left": 0, "stop": 0, "size": 1, "asked": 2, "skipped": 2, "note": 3}
        keep = sorted(range(len(lines)), key=lambda i: (rank[lines[i].kind], i))[:_MOST]
        lines = [lines[i] for i in sorted(keep)]
    return lines, left_out


def decided(run: Columns) -> list[str]:
    """How often each hook has asked for something, and how often for what was so already."""
    asked, new = Counter[str](), Counter[str]()
    for told in run.told:
        if told.decision:
            by = _by(run, told)
            asked[by] += 1
            new[by] += _asks_for_more(told)
    return [
        f"{by} asked for something {counted(asked[by], 'time')}"
        + (f", {new[by]:,} of them for something else than there was" if new[by] < asked[by] else "")
        + "."
        for by in asked
    ]


def sizes_in_words(sizes: Sequence[int] | np.ndarray) -> str:
    """ "64 + 32 + – = 96", or, of many, "2,048 = 64 workers of 28 to 36"."""
    some = [int(size) for size in sizes if size]
    if len(sizes) == 1:
        return f"{sum(some):,}"
    if len(sizes) <= _FEW:
        return " + ".join(f"{int(size):,}" if size else "–" for size in sizes) + f" = {sum(some):,}"
    if not some:
        return "none"
    each = f"{min(some):,}" if min(some) == max(some) else f"{min(some):,} to {max(some):,}"
    return f"{sum(some):,} = {counted(len(some), 'worker')} of {each}"


# --- sizes ------------------------------------------------------------------------------------------------------------


def _resized(run: Columns) -> Iterator[Change]:
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
    told, moves = iter(run.told), {move.row: move for move in _moves(run)}
    following = next(told, None)
    last: Told | None = None  # the last decision that was not carried out yet
    for i in range(1, len(run.changes)):
        row = int(run.changes[i])
        while following is not None and following.row < row:
            last = following if _is_about_sizes(following) else last
            following = next(told, None)
        before, behind = run.changed[i - 1], run.changed[i]
        stays = before.sum() == behind.sum()
        if row in moves:
            yield _Resize(row, before, behind, moves[row].why, "")
        elif last is not None:
            by = _by(run, last)
            at = f"{by}, behind step {run.step[last.row]:,}"
            yield _Resize(row, before, behind, f"{at}: {_asked(last)}", f"{by} {stays}")
        else:
            yield _Resize(row, before, behind, "asked for by the script, or by who is there", "")


def _line(resize: _Resize) -> Change:
    what = f"{sizes_in_words(resize.before)} → {sizes_in_words(resize.behind)}"
    if len(resize.before) > _FEW and resize.before.sum() == resize.behind.sum():
        what = f"{_moved(resize)}, of {resize.behind.sum():,}"
    return Change(resize.row, "size", f"Batch sizes: {what}", resize.by)


def _moved(resize: _Resize) -> str:
    by_worker = resize.behind - resize.before
    most = int(np.abs(by_worker).argmax())
    moved = int(np.abs(by_worker).sum()) // 2
    at_most = f"worker {most} {resize.before[most]} → {resize.behind[most]}"
    return f"{counted(moved, 'example')} moved between workers (most: {at_most})"


def _folded(run: Columns, alike: Sequence[_Resize]) -> Change:
    first, last = alike[0], alike[-1]
    by = first.kind.rpartition(" ")[0]
    when = f"{len(alike):,} changes up to step {run.step[last.row]:,}"
    if first.kind.endswith("True"):
        largest = max(alike, key=lambda resize: int(np.abs(resize.behind - resize.before).sum()))
        most = f"in the largest, in step {run.step[largest.row]:,}, {_moved(largest)}"
        what = f"Batch sizes: {when}, of the split alone; {most}"
        ends = f"; {sizes_in_words(first.before)} → {sizes_in_words(last.behind)}"
        return Change(first.row, "size", what + ends, by)
    through = [first.before, *(resize.behind for resize in alike)]
    totals = [int(sizes.sum()) for sizes in through]
    if len(totals) > 12:
        totals = [*totals[:6], -1, *totals[-5:]]
    path = " → ".join("…" if total < 0 else f"{total:,}" for total in totals)
    return Change(first.row, "size", f"Batch sizes: {when}: {path}; in the end {sizes_in_words(last.behind)}", by)


# --- decisions --------------------------------------------------------------------------------------------------------


def _by(run: Columns, told: Told) -> str:
    """Whose decision it was. Older records do not say; then it is one of the hooks that were due."""
    names = (told.decision or {}).get("by")
    if names:
        return listed(names)
    step = int(run.step[told.row])
    due = [hook["name"].partition("/")[2] or hook["name"] for hook in run.header["hooks"] if step % hook["every"] == 0]
    return " or ".join(due) or "a hook"


def _asked(told: Told) -> str:
    decision = told.decision or {}
    asked = []
    if decision.get("workers") is not None:
        asked.append(counted(decision["workers"], "worker"))
    if decision.get("global_batch") is not None:
        asked.append(f"a global batch of {decision['global_batch']:,}")
    if decision.get("shares"):
        asked.append(_shares(decision["shares"]))
    if decision.get("stop"):
        asked.append("the end")
    asked += [f"{name} = {value}" for name, value in (decision.get("hyperparameters") or {}).items()]
    return listed(asked) or "nothing"


def _is_about_sizes(told: Told) -> bool:
    """Whether sizes may have changed for it; a hyper-parameter that was set moves no example."""
    decision = told.decision or {}
    return bool(decision) and not (decision.get("hyperparameters") and _asked(told) == _values(decision))


def _values(decision: Mapping[str, Any]) -> str:
    return listed([f"{name} = {value}" for name, value in (decision.get("hyperparameters") or {}).items()])


def _shares(shares: Sequence[float]) -> str:
    if len(shares) > _FEW or sum(shares) <= 0:
        return "another split"
    return "a split of " + " : ".join(f"{share / sum(shares):.0%}".replace("%", " %") for share in shares)


def _asks_for_more(told: Told) -> bool:
    """Whether a decision asks for something else than had been asked for before; of shares one cannot tell."""
    decision, before = told.decision or {}, told.asked or {}
    new = decision.get("global_batch") is not None and decision["global_batch"] != before.get("global_batch")
    numbers = before.get("workers") or [None]
    new |= decision.get("workers") is not None and decision["workers"] != numbers[0]
    return bool(new or decision.get("shares") or decision.get("stop") or decision.get("hyperparameters"))


def _not_carried_out(run: Columns) -> Iterator[Change]:
    """What was asked for in the end, and did not come to be; and who asked for the end."""
    for told in run.told:
        if told.decision and told.decision.get("stop"):
            yield Change(told.row, "stop", "The end of the run", f"{_by(run, told)} asked for it")
    last = next((told for told in reversed(run.told) if told.decision), None)
    if last and last.asked and last.row < len(run) - 1 and _asks_for_size(last) and run.changes[-1] <= last.row:
        what = f"Asked for, and not there by the end: {_asked(last)}"
        yield Change(last.row, "asked", what, _by(run, last))


def _asks_for_size(told: Told) -> bool:
    decision, before = told.decision or {}, told.asked or {}
    return decision.get("global_batch") not in (None, before.get("global_batch"))


# --- who came, what was skipped, what was noted -----------------------------------------------------------------------


class _Move(NamedTuple):
    """Who came and who went between two steps."""

    row: int
    joined: tuple[int, ...]
    lost: tuple[str, ...]
    left: tuple[int, ...]

    @property
    def why(self) -> str:
        """In a few words."""
        lost = [seat for text in self.lost for seat in _lost_seats(text)]
        pairs = (self.joined, "joined"), (lost, "lost"), (self.left, "left")
        return listed([f"{workers(seats)} {what}" for seats, what in pairs if seats]) or "workers have come or gone"


def _moves(run: Columns) -> Iterator[_Move]:
    told = {told.row: told for told in run.told if told.joined or told.lost}
    others = dict(run.members[1:])
    before = {row: set(members) for (row, _), (_, members) in zip(run.members[1:], run.members[:-1], strict=True)}
    for row in sorted(told.keys() | others.keys()):
        joined, lost = (told[row].joined, told[row].lost) if row in told else ((), ())
        gone = before[row] - set(others[row]) if row in others else set()
        left = gone - {seat for text in lost for seat in _lost_seats(text)}
        yield _Move(row, joined, lost, tuple(sorted(left)))


def _lost_seats(text: str) -> list[int]:
    """Of which workers a loss tells: "workers 1, 2 lost: rank 1 (…"."""
    found = _LOST.match(text)
    return [int(seat) for seat in found[1].split(",")] if found else []


def _come_and_gone(run: Columns) -> Iterator[Change]:
    for move in _moves(run):
        if move.joined:
            yield Change(move.row, "joined", f"{workers(move.joined).capitalize()} joined", "")
        if move.left:
            yield Change(move.row, "left", f"{workers(move.left).capitalize()} left", "")
        for text in move.lost:
            yield Change(move.row, "lost", text[:1].upper() + text[1:], "")
    for told in run.told:
        told_already = {*told.lost, *(told.decision or {}).get("notes", ())}
        for note in told.notes:
            if note not in told_already and "has joined on seat" not in note and not run.skipped[told.row]:
                yield Change(told.row, "note", note[:1].upper() + note[1:], "")


def _skipped(run: Columns) -> Iterator[Change]:
    """Steps that were given up, those beside one another in one line."""
    rows = np.flatnonzero(run.skipped)
    notes = {told.row: told.notes for told in run.told if told.notes}
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
        yield Change(first, "skipped", what, " ".join(list(why)[:3]))


def _beside(rows: np.ndarray) -> list[np.ndarray]:
    return np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1) if len(rows) else []
