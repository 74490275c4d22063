"""Remove from a record the steps that its run repeats."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .rewriting import rewritten
from .sinks import Resumption

HEADER = re.compile(rb'\{"kind": ?"header"')  # cannot occur in a string of a line, whose quotes are escaped
_STEP = re.compile(rb'^\{"kind": "step", "step": (\d+)[^\n]*\n?', re.MULTILINE)


class HeldBack(NamedTuple):
    """A record from which the later steps of a run are removed.

    Attributes:
      header: the last header of the run, if the file ends with the lines below it.
      resumed: the field `resumed` of the next line, on the removed steps; one entry for each restore of the run.
    """

    header: dict[str, Any] | None
    resumed: list[dict[str, Any]]


class _Part(NamedTuple):
    """A header and the lines below it; offsets in the file."""

    begin: int
    end: int
    header: dict[str, Any] | None  # None if it was cut


class _Cut(NamedTuple):
    """A part of the run, cut after the last step that is kept."""

    part: _Part
    end: int
    removed: list[dict[str, Any]]  # steps
    kept_at: float | None  # when the last step that is kept ended

    @property
    def empty(self) -> bool:
        """Whether no step is left."""
        return self.end == self.part.begin


def hold_back(path: Path, resumption: Resumption) -> HeldBack:
    """Remove the steps of a run after the one that it resumes from, and lines that were cut. Other runs stay.

    If other runs follow in the file, the lines of this run move to the end.

    Raises:
      OSError: the file cannot be read or written.
    """
    if not path.is_file() or not path.stat().st_size:
        return HeldBack(None, [])
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        parts = list(_parts(data))
        ours = [_cut(data, part, resumption.step) for part in parts if _is_of(part, resumption.run_id)]
        if not ours:
            return HeldBack(None, [])
        others = [part for part in parts if not _is_of(part, resumption.run_id)]
        stays = parts[len(others) :] == [cut.part for cut in ours] and all(cut.end == cut.part.end for cut in ours)
        if not stays:
            with rewritten(path) as new:
                new.write(data[: parts[0].begin])
                for begin, end in [*((p.begin, p.end) for p in others), *((c.part.begin, c.end) for c in ours)]:
                    new.write(data[begin:end])
        header = next((cut.part.header for cut in reversed(ours) if not cut.empty), None)
        kept_at = next((cut.kept_at for cut in reversed(ours) if cut.kept_at is not None), None)
        return HeldBack(header, _marks(resumption, [step for cut in ours for step in cut.removed], kept_at))


def _parts(data: mmap.mmap) -> Iterator[_Part]:
    begins = [match.start() for match in HEADER.finditer(data)]
    for begin, end in zip(begins, [*begins[1:], len(data)], strict=True):
        line_end = data.find(b"\n", begin, end)
        yield _Part(begin, end, _loaded(data[begin : line_end if line_end >= 0 else end]))


def _is_of(part: _Part, run_id: str) -> bool:
    return part.header is not None and bool(run_id) and part.header.get("run_id") == run_id


def _cut(data: mmap.mmap, part: _Part, step: int) -> _Cut:
    """Find the end of the last step that is kept; the beginning of the part if no step is kept."""
    end, removed, last = part.begin, [], None
    for match in _STEP.finditer(data, part.begin, part.end):
        if int(match[1]) > step:
            removed.append(_loaded(match[0]))
        elif not removed and match[0].endswith(b"\n"):
            end, last = match.end(), match[0]
    kept = (_loaded(last) if last else None) or {}
    return _Cut(part, end, [fields for fields in removed if fields is not None], kept.get("at"))


def _marks(resumption: Resumption, removed: list[dict[str, Any]], kept_at: float | None) -> list[dict[str, Any]]:
    """Return the marks of earlier removals in the removed lines, and a mark with the number and seconds of these, and
    the number of those in which workers were lost.

    Args:
      resumption: which lines were removed, and why.
      removed: the fields of the removed lines.
      kept_at: when the last step that is kept ended, in seconds since 1970.
    """
    marks = [mark for fields in removed for mark in fields.get("resumed", ())]
    if resumption.restored:
        seconds = sum(fields.get("seconds") or 0.0 for fields in removed)
        losses = sum(bool(fields.get("lost")) for fields in removed)
        mark = {"after": resumption.step, "repeated": len(removed), "seconds": round(seconds, 6), "losses": losses}
        marks.append(mark | _wall_clock(removed, kept_at))
    return marks


def _wall_clock(removed: list[dict[str, Any]], kept_at: float | None) -> dict[str, Any]:
    """Return where the time between the last step that is kept and the last removed one went, for a mark: `examples`,
    `to` (when the last one ended), seconds `between` the steps, and the `origins` of processes that began meanwhile,
    each with the end of the `last` step before it. Empty if the record has no wall-clock times.
    """
    if not removed or "at" not in removed[-1]:
        return {}
    between: dict[str, float] = {}
    origins, last = [], kept_at
    for fields in removed:
        if (origin := fields.get("origin")) is not None:
            times = {name: origin[name] for name in ("process", "build", "built")}
            origins.append({**times, "last": last})
        for name, seconds in fields.get("between", {}).items():
            between[name] = round(between.get(name, 0.0) + seconds, 6)
        last = fields.get("at")
    examples = sum(sum(fields["batch_sizes"]) for fields in removed)
    return {"examples": examples, "to": last, "between": between, "origins": origins}


def _loaded(text: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None
