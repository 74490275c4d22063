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
        return HeldBack(header, _marks(resumption, [step for cut in ours for step in cut.removed]))


def _parts(data: mmap.mmap) -> Iterator[_Part]:
    begins = [match.start() for match in HEADER.finditer(data)]
    for begin, end in zip(begins, [*begins[1:], len(data)], strict=True):
        line_end = data.find(b"\n", begin, end)
        yield _Part(begin, end, _loaded(data[begin : line_end if line_end >= 0 else end]))


def _is_of(part: _Part, run_id: str) -> bool:
    return part.header is not None and bool(run_id) and part.header.get("run_id") == run_id


def _cut(data: mmap.mmap, part: _Part, step: int) -> _Cut:
    """Find the end of the last step that is kept; the beginning of the part if no step is kept."""
    end, removed = part.begin, []
    for match in _STEP.finditer(data, part.begin, part.end):
        if int(match[1]) > step:
            removed.append(_loaded(match[0]))
        elif not removed and match[0].endswith(b"\n"):
            end = match.end()
    return _Cut(part, end, [fields for fields in removed if fields is not None])


def _marks(resumption: Resumption, removed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the marks of earlier removals in the removed lines, and a mark with the number and seconds of these."""
    marks = [mark for fields in removed for mark in fields.get("resumed", ())]
    if resumption.restored:
        seconds = sum(fields.get("seconds") or 0.0 for fields in removed)
        marks.append({"after": resumption.step, "repeated": len(removed), "seconds": round(seconds, 6)})
    return marks


def _loaded(text: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None
