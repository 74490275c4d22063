"""Read a record: the runs in the file, and their lines.

This module finds where runs begin, skips truncated lines, checks the version and fills in omitted fields. The
meaning of the fields is left to its callers.
"""

from __future__ import annotations

import json
import logging
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from adaptive.base.errors import RecordError

from .record import AS_BEFORE, READABLE_VERSIONS
from .record_resume import HEADER

_log = logging.getLogger("adaptive")
_BEGINS = (b'{"kind": "', b'{"kind":"')  # how every line that a program writes begins


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

    The record has one line per step. For a step that was repeated after a restore this is the last repetition, and the
    field `resumed` of the first such step gives the step after which the run was restored, the number of recorded steps
    that were discarded, and the seconds that these took.

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
    headers = [(begin, header) for begin in lines.headers() if (header := lines.header(begin)) is not None]
    runs: list[list[tuple[int, dict[str, Any]]]] = []
    for begin, header in headers:
        run_id = header.get("run_id")
        if runs and run_id and runs[-1][-1][1].get("run_id") == run_id:
            runs[-1].append((begin, header))
        else:
            runs.append([(begin, header)])
    if not -len(runs) <= run < len(runs):
        there = f"holds {len(runs)} run{'s' * (len(runs) != 1)}"
        raise RecordError(f"{path}: {there}; there is no run {run}." if runs else f"{path}: {there}.")
    return [RecordedRun(header, lines.steps(begin)) for begin, header in runs[run]]


class _Lines:
    """The lines of a record, which may be some hundred MB: the file is searched for headers, and only the lines of the
    wanted run are parsed.
    """

    def __init__(self, path: Path):
        self._path = path
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        self._loads = _fastest_loads()

    def headers(self) -> list[int]:
        """Return the offsets of all headers, in bytes.

        Raises:
          RecordError: the file begins with something other than a header.
        """
        found = [match.start() for match in HEADER.finditer(self._data)]
        first = found[0] if found else len(self._data)
        headless = self._data[: min(first, 1 << 16)]
        if headless.strip():
            self._check_headless(headless)
        return found

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
                f"{' and '.join(map(str, READABLE_VERSIONS))}, in which values have names. Record the run again."
            )
        return fields

    def steps(self, header: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the steps below the header at this offset: line number and fields.

        Raises:
          RecordError: a line is neither a header nor a step.
        """
        if (following := HEADER.search(self._data, header + 1)) is not None:
            end = following.start()
        else:
            end = len(self._data)
        number, begin = self._number(header), self._data.find(b"\n", header, end) + 1 or end
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
