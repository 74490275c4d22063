"""Read a record: the runs in the file, and their lines.

What stands in a line is for those to know who use it. Here is known what all of them need: where a run begins, which
lines were cut, which versions can be read, and what a line leaves out.
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
_BEGINS = (b'{"kind": "', b'{"kind":"')  # every line that a program writes


class RecordedRun(NamedTuple):
    """One run of a record.

    Attributes:
      header: the fields of its first line.
      steps: the number of a line in the file and the fields of the step in it, one after another: they are read while
        they are asked for, and once.
    """

    header: dict[str, Any]
    steps: Iterator[tuple[int, dict[str, Any]]]


def read_run(path: str | Path, run: int = -1) -> RecordedRun:
    """Read one run of the file that `Program.run` was given as `record=`.

    There is one line for each step: a step that was taken again after a restore stands as it was taken last, and the
    field `resumed` of the first such step says after which step the run was restored, how many recorded steps were
    discarded then, and how many seconds these had taken.

    A line that was cut, where a run was killed or a disk was full, is passed over with a warning in the log "adaptive",
    and so are the lines behind it, up to the next run: what steps tell of the step before would be another's.

    Args:
      path: the file.
      run: which one, if the file holds several; by default the last. Of a run that was restarted with another number of
        workers, or with other hooks or limits, the last part: see `read_parts`.

    Raises:
      RecordError: it is no record, or one of another version, or has no such run.
      OSError: it cannot be read.
    """
    return read_parts(path, run)[-1]


def read_parts(path: str | Path, run: int = -1) -> list[RecordedRun]:
    """Read all parts of a run, each with a header of its own: a run that was restarted with another number of workers
    has one part before and one after. Their steps follow one another.

    Args:
      path: the file that `Program.run` was given as `record=`.
      run: which one, if the file holds several; by default the last.

    Raises:
      RecordError: it is no record, or one of another version, or has no such run.
      OSError: it cannot be read.
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
    """A file of some hundred MB is looked through for headers, and of one run alone the lines are read."""

    def __init__(self, path: Path):
        self._path = path
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        self._loads = _fastest_loads()

    def headers(self) -> list[int]:
        """Where runs begin."""
        found = [match.start() for match in HEADER.finditer(self._data)]
        first = found[0] if found else len(self._data)
        headless = self._data[: min(first, 1 << 16)]
        if headless.strip():
            self._check_headless(headless)
        return found

    def _check_headless(self, text: bytes) -> None:
        """In front of the first header there may be one that was cut, with its steps; and nothing else."""
        line = text.partition(b"\n")[0]
        if self._object(line) is not None:
            raise RecordError(f"{self._path}:1: neither a header nor a step behind one. Is this a recorded run?")
        self._cut(1, line)

    def header(self, begin: int) -> dict[str, Any] | None:
        """The fields of one; `None` if it was cut."""
        end = self._data.find(b"\n", begin)
        fields = self._object(self._data[begin : end if end >= 0 else len(self._data)])
        if fields is None:  # cut, with the next run added to it or behind it
            _log.warning("%s:%d: this line is cut. It is passed over, with its run.", self._path, self._number(begin))
            return None
        if fields.get("version") not in READABLE_VERSIONS:
            raise RecordError(
                f"{self._path}:{self._number(begin)}: a record of version {fields.get('version')}; this reads "
                f"{' and '.join(map(str, READABLE_VERSIONS))}, in which values have names. Record the run again."
            )
        return fields

    def steps(self, header: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """The steps of the run whose header stands there."""
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
                raise RecordError(
                    f"{self._path}:{number}: neither a header nor a step behind one. Is this a recorded run?"
                )
            begin = behind

    def _cut(self, number: int, text: bytes) -> None:
        text = text.strip()
        if not any(text.startswith(begins[: len(text)]) for begins in _BEGINS):
            raise RecordError(f"{self._path}:{number}: not a line of JSON. Is this a recorded run?")
        why = "%s:%d: this line is cut. It is passed over, and so are any steps behind it, up to the next run."
        _log.warning(why, self._path, number)

    def _number(self, begin: int) -> int:
        """Of the line that begins there."""
        blocks = range(0, begin, 1 << 24)
        return 1 + sum(self._data[block : min(block + (1 << 24), begin)].count(b"\n") for block in blocks)

    def _object(self, text: bytes) -> dict[str, Any] | None:
        try:
            line = self._loads(text)
        except ValueError:
            try:
                line = json.loads(text)  # which takes NaN, too, should another program have written it
            except ValueError:
                return None
        return line if isinstance(line, dict) else None


def _fastest_loads() -> Callable[[bytes], Any]:
    """A long run of many workers is some hundred MB, of which Python's own reader reads 150 a second."""
    try:
        from orjson import loads
    except ImportError:
        return json.loads
    return loads
