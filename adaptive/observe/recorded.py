"""Read a record: the runs in the file, and their lines.

This module finds where runs begin, keeps the last line of each step, skips truncated lines, checks the version and
fills in omitted fields. The meaning of the fields is left to its callers.
"""

from __future__ import annotations

import itertools
import json
import logging
import mmap
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from adaptive.base.errors import RecordError

from .record import AS_BEFORE, READABLE_VERSIONS

_log = logging.getLogger("adaptive")
_BEGINS = (b'{"kind": "', b'{"kind":"')  # how every line that a program writes begins
_HEADER = re.compile(rb'\{"kind": ?"header"')  # cannot occur in a string of a line, whose quotes are escaped
_STEP = re.compile(rb'^\{"kind": ?"step", ?"step": ?(\d+)[^\n]*', re.MULTILINE)
_PASSING = ("global_batch", "quantum")  # fields of a header that hold for the first step only


class RecordedRun(NamedTuple):
    """One run of a record.

    Attributes:
      header: the fields of the header line.
      steps: an iterator over `(line number in the file, fields of the step)`, which reads lines lazily, and once.
    """

    header: dict[str, Any]
    steps: Iterator[tuple[int, dict[str, Any]]]


def read_run(path: str | Path, run: int = -1) -> RecordedRun:
    """Read one run of a record, the file that `Program.run(record=…)` writes.

    Each step is read once. Of a step that was repeated after a restore this is the last repetition, and the field
    `resumed` of the first such step gives, for each restore, the step after which the run was restored, the number of
    recorded steps that were discarded, and the seconds that these took.

    A line that was cut, because a run was killed or a disk was full, is skipped with a warning in the log
    "adaptive", and so are the lines after it, up to the next run: their fields refer to the previous line.

    Args:
      path: the file.
      run: index of the run, if the file holds several; by default the last. Of a run that was restarted with another
        number of workers, or with other hooks or limits, the last part is read: see `read_parts`.

    Raises:
      RecordError: the file is not a record, has another version, or has no such run.
      OSError: the file cannot be read.
    """
    return read_parts(path, run)[-1]


def read_parts(path: str | Path, run: int = -1) -> list[RecordedRun]:
    """Read all parts of a run, each with its own header: a run that was restarted with another number of workers has
    one part from before the restart and one from after it. The parts' step numbers are consecutive.

    Args:
      path: the file that `Program.run(record=…)` writes.
      run: index of the run, if the file holds several; by default the last.

    Raises:
      RecordError: the file is not a record, has another version, or has no such run.
      OSError: the file cannot be read.
    """
    lines = _Lines(Path(path))
    by_id: dict[object, list[_Part]] = {}  # the run that was written last comes last
    for part in lines.parts():
        run_id = part.header.get("run_id") or part.begin  # without an id, each part is a run
        by_id[run_id] = [*by_id.pop(run_id, ()), part]
    runs = list(by_id.values())
    if not -len(runs) <= run < len(runs):
        there = f"holds {len(runs)} run{'s' * (len(runs) != 1)}"
        raise RecordError(f"{path}: {there}; there is no run {run}." if runs else f"{path}: {there}.")
    found: list[tuple[dict[str, Any], list[_Part]]] = []
    for part in _with_each_step_once(lines, runs[run]):
        if found and _lasting(found[-1][0]) == _lasting(part.header):
            found[-1][1].append(part)
        else:
            found.append((part.header, [part]))
    return [RecordedRun(header, itertools.chain.from_iterable(map(lines.steps, parts))) for header, parts in found]


def _lasting(header: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a header that hold for all steps below it."""
    return {name: value for name, value in header.items() if name not in _PASSING}


@dataclass
class _Part:
    """A header with the lines below it, whose step numbers are consecutive.

    Attributes:
      begin, end: offsets in the file.
      first: the number of the first step; `None` if there is no step.
      stop: the number of the first step that a later part repeats.
      marks: the restores before the first step, for its field `resumed`.
    """

    header: dict[str, Any]
    begin: int
    end: int
    first: int | None
    stop: float = inf
    marks: list[dict[str, Any]] = field(default_factory=list)


def _with_each_step_once(lines: _Lines, parts: Sequence[_Part]) -> list[_Part]:
    """Return the parts of a run that have steps which no later part repeats, and note where the others stop."""
    kept: list[_Part] = []
    for part in [part for part in parts if part.first is not None]:
        assert part.first is not None
        discarded: list[dict[str, Any]] = []
        for earlier in kept:
            if earlier.stop > part.first:
                discarded += lines.between(earlier, part.first, earlier.stop)
                part.marks += earlier.marks if earlier.first is not None and earlier.first >= part.first else []
                earlier.stop = part.first
        kept = [earlier for earlier in kept if earlier.first is not None and earlier.first < earlier.stop]
        if lines.first_step(part).get("restored"):
            part.marks.append(_mark(part.first - 1, discarded, lines.last_step(kept[-1]).get("at") if kept else None))
        kept.append(part)
    return kept or list(parts[-1:])


def _mark(after: int, discarded: Sequence[dict[str, Any]], kept_at: float | None) -> dict[str, Any]:
    """Return the description of a restore: its step, the number, seconds and losses of the steps that were discarded,
    and where the time between the last step that is kept and the last discarded one went: `examples`, `to` (when the
    last one ended), seconds `between` the steps, and the `origins` of processes that began meanwhile, each with the end
    of the `last` step before it.

    Args:
      after: the last step before the restore.
      discarded: the fields of the discarded lines.
      kept_at: when the last step that is kept ended, in seconds since 1970.
    """
    seconds = sum(fields.get("seconds") or 0.0 for fields in discarded)
    losses = sum(bool(fields.get("lost")) for fields in discarded)
    mark = {"after": after, "repeated": len(discarded), "seconds": round(seconds, 6), "losses": losses}
    if not discarded or "at" not in discarded[-1]:
        return mark
    between: dict[str, float] = {}
    origins, last = [], kept_at
    for fields in discarded:
        if (origin := fields.get("origin")) is not None:
            origins.append({**{name: origin[name] for name in ("process", "build", "built")}, "last": last})
        for name, spent in fields.get("between", {}).items():
            between[name] = round(between.get(name, 0.0) + spent, 6)
        last = fields.get("at")
    examples = sum(sum(fields["batch_sizes"]) for fields in discarded)
    return {**mark, "examples": examples, "to": last, "between": between, "origins": origins}


class _Lines:
    """The lines of a record, which may be some hundred MB: the file is searched for headers, and only the lines of the
    wanted run are parsed.
    """

    def __init__(self, path: Path):
        self._path = path
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        self._loads = _fastest_loads()

    def parts(self) -> Iterator[_Part]:
        """Yield the parts of all runs.

        Raises:
          RecordError: the file begins with something other than a header, or a record's version cannot be read.
        """
        begins = [match.start() for match in _HEADER.finditer(self._data)]
        headless = self._data[: min(begins[0] if begins else len(self._data), 1 << 16)]
        if headless.strip():
            self._check_headless(headless)
        for begin, end in itertools.pairwise([*begins, len(self._data)]):
            if (header := self.header(begin)) is not None:
                first = _STEP.search(self._data, begin, end)
                yield _Part(header, begin, end, None if first is None else int(first[1]))

    def between(self, part: _Part, first: int, stop: float) -> list[dict[str, Any]]:
        """Return the fields of a part's steps from `first` to before `stop`, as they are in their lines."""
        matches = _STEP.finditer(self._data, part.begin, part.end)
        found = (self._object(match[0]) for match in matches if first <= int(match[1]) < stop)
        return [fields for fields in found if fields is not None]

    def first_step(self, part: _Part) -> dict[str, Any]:
        """Return the fields of a part's first step; empty if its line was cut."""
        found = _STEP.search(self._data, part.begin, part.end)
        return (self._object(found[0]) if found else None) or {}

    def last_step(self, part: _Part) -> dict[str, Any]:
        """Return the fields of the last step before `part.stop`; empty if its line was cut."""
        last: re.Match[bytes] | None = None
        for match in _STEP.finditer(self._data, part.begin, part.end):
            if int(match[1]) < part.stop:
                last = match
        return (self._object(last[0]) if last else None) or {}

    def _check_headless(self, text: bytes) -> None:
        """Check that text before the first header is a header that was cut, with its steps; warn about it."""
        line = text.partition(b"\n")[0]
        if self._object(line) is not None:
            raise RecordError(f"{self._path}:1: not a valid line of a record. Is this file a recorded run?")
        self._cut(1, line)

    def header(self, begin: int) -> dict[str, Any] | None:
        """Return the fields of the header at this offset; `None` if it was cut.

        Raises:
          RecordError: the record has a version that cannot be read.
        """
        end = self._data.find(b"\n", begin)
        fields = self._object(self._data[begin : end if end >= 0 else len(self._data)])
        if fields is None:  # cut; the next run may begin in the same line
            _log.warning("%s:%d: this line is truncated. It is skipped, with its run.", self._path, self._number(begin))
            return None
        if fields.get("version") not in READABLE_VERSIONS:
            raise RecordError(
                f"{self._path}:{self._number(begin)}: a record of version {fields.get('version')}; this reads "
                f"{', '.join(map(str, READABLE_VERSIONS))}, in which values have names. Record the run again."
            )
        return fields

    def steps(self, part: _Part) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the steps of a part before `part.stop`: line number and fields.

        Raises:
          RecordError: a line is neither a header nor a step.
        """
        end = part.end
        number, begin = self._number(part.begin), self._data.find(b"\n", part.begin, end) + 1 or end
        before: dict[str, Any] = {}
        while begin < end:
            number += 1
            behind = self._data.find(b"\n", begin, end) + 1 or end
            text = self._data[begin:behind]
            fields = self._object(text)
            if fields is None:
                if text.strip():
                    self._cut(number, text)
                    return
            elif fields.get("kind") == "step":
                for name, source in AS_BEFORE.items():
                    if name not in fields and source in before:
                        fields[name] = before[source]
                if fields.get("step", 0) >= part.stop:
                    return
                if not before and part.marks:
                    fields["resumed"] = [*part.marks, *fields.get("resumed", ())]
                before = fields
                yield number, fields
            else:
                raise RecordError(f"{self._path}:{number}: not a valid line of a record. Is this file a recorded run?")
            begin = behind

    def _cut(self, number: int, text: bytes) -> None:
        text = text.strip()
        if not any(text.startswith(begins[: len(text)]) for begins in _BEGINS):
            raise RecordError(f"{self._path}:{number}: not a line of JSON. Is this a recorded run?")
        why = "%s:%d: this line is truncated. It is skipped, and so are any steps after it, up to the next run."
        _log.warning(why, self._path, number)

    def _number(self, begin: int) -> int:
        """Return the number of the line that begins at this offset."""
        blocks = range(0, begin, 1 << 24)
        return 1 + sum(self._data[block : min(block + (1 << 24), begin)].count(b"\n") for block in blocks)

    def _object(self, text: bytes) -> dict[str, Any] | None:
        try:
            line = self._loads(text)
        except ValueError:
            try:
                line = json.loads(text)  # accepts NaN, which another program may have written
            except ValueError:
                return None
        return line if isinstance(line, dict) else None


def _fastest_loads() -> Callable[[bytes], Any]:
    """Return orjson's parser if installed, else Python's, which reads only 150 MB per second of possibly several
    hundred.
    """
    try:
        from orjson import loads
    except ImportError:
        return json.loads
    return loads
