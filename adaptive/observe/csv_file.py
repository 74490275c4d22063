"""A sink for spreadsheets and `pandas.read_csv`: a row for each step, a column for each number."""

from __future__ import annotations

import csv
import io
import itertools
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from .events import StepEvent
from .line_file import LineFile
from .scalars import describe, noise_names, scalars

_log = logging.getLogger("adaptive")


class CSV:
    """A sink that appends a row for each step: its number, all its scalars, what happened in it, and the run's id.

        program.run(epochs=10, log=[ad.log.CSV("run.csv")])

    The file only grows. Steps that are repeated after a restore have several rows, of which the last one counts:
    `pandas.read_csv(path).drop_duplicates(["run_id", "step"], keep="last")`. Its first row fixes the columns. If a
    number of another name appears later, the rows continue in another file with one more column, `run.2.csv`, and a
    warning says so.

    Args:
      path: the file. Rows of other runs stay above those of this run; the column `run_id` distinguishes the runs.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._columns: list[str] = []
        self._known: set[str] = set()
        self._file: LineFile | None = None

    def write(self, event: StepEvent) -> None:
        """Append a row."""
        row: dict[str, object] = {"step": event.report.step, **scalars(event)}
        for name in noise_names(event):  # the values are unknown in the first steps
            row.setdefault(name, "")
        notes = " ".join("; ".join(describe(event)).splitlines())  # so that each row is one line
        row |= {"notes": notes, "run_id": event.run_id}
        if self._file is None or not row.keys() <= self._known:
            self._open(row)
        assert self._file is not None
        self._file.write(_line(row.get(name, "") for name in self._columns))

    def _open(self, row: dict[str, object]) -> None:
        """Open the last file of this log that has all columns of a row, or another one."""
        self.close()
        for number in itertools.count(1):
            path = self._path.with_name(f"{self._path.stem}.{number}{self._path.suffix}") if number > 1 else self._path
            file = LineFile(path)
            if file.empty:
                self._columns += [name for name in row if name not in self._columns]
                file.write(_line(self._columns))
            else:
                with path.open(newline="", encoding="utf-8") as lines:
                    self._columns = next(csv.reader(lines))
            self._known = set(self._columns)
            if row.keys() <= self._known:
                self._file = file
                return
            file.close()
            new = sorted(row.keys() - self._known)
            _log.warning("%s has no column %s. The rows continue in another file.", path, ", ".join(new))

    def close(self) -> None:
        """Close the file; a later run adds rows to it."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __repr__(self) -> str:
        return f"CSV({str(self._path)!r})"


def _line(cells: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()
