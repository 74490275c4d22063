"""A sink for spreadsheets and `pandas.read_csv`: a row for each step, a column for each number."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from .events import StepEvent
from .line_file import LineFile
from .scalars import describe, noise_names, scalars

_log = logging.getLogger("adaptive")


class CSV:
    """A sink that appends a row for each step: its number, all its scalars, what happened in it, and the run's id.

        program.run(epochs=10, log=[ad.log.CSV("run.csv")])

    The file only grows. A step that is repeated after a restore has several rows, of which the last one counts, and a
    row that was cut has no id: `pandas.read_csv(path).dropna(subset="run_id").drop_duplicates(["run_id", "step"],
    keep="last")`; so has a step to which `program.log` adds values. The first row of the file fixes the columns. A
    number of another name is left out, with a warning; `ad.log.JSONL` has all of them.

    Args:
      path: the file. Rows of other runs stay above those of this run; the column `run_id` distinguishes the runs.
      columns: names of numbers that come later, such as those of `program.evaluate(log="val")`: `["val.loss"]`.
    """

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str] = ()):
        self._path, self._later = Path(path), columns
        self._columns: list[str] = []
        self._left_out: set[str] = set()
        self._file: LineFile | None = None

    def write(self, event: StepEvent) -> None:
        """Append a row."""
        row: dict[str, object] = {"step": event.report.step}
        row |= {_unquoted(name): value for name, value in scalars(event).items()}
        for name in (*noise_names(event), *map(_unquoted, self._later)):  # unknown in the first steps
            row.setdefault(name, "")
        row |= {"notes": _unquoted("; ".join(describe(event))), "run_id": event.run_id}
        if self._file is None:
            self._open(list(row))
        assert self._file is not None
        if new := row.keys() - self._columns - self._left_out:
            self._left_out |= new
            _log.warning(
                "%s has no column for %s. In a new file, name it beforehand:  ad.log.CSV(path, columns=%s)",
                *(self._path, ", ".join(sorted(new)), sorted(new)),
            )
        self._file.write(",".join(str(row.get(name, "")) for name in self._columns))

    def _open(self, columns: list[str]) -> None:
        self._file = LineFile(self._path)
        if self._file.empty:
            self._columns = columns
            self._file.write(",".join(columns))
        else:
            with self._path.open(encoding="utf-8") as lines:
                self._columns = lines.readline().rstrip("\n").split(",")

    def close(self) -> None:
        """Close the file; a later run adds rows to it."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __repr__(self) -> str:
        return f"CSV({str(self._path)!r})"


@lru_cache(maxsize=1024)
def _unquoted(text: str) -> str:
    """Return a text in one cell without quotes: a quoted cell that was cut would swallow the rows below it."""
    return " ".join(text.translate(_REPLACED).split())


_REPLACED = str.maketrans({'"': "'", ",": ";"})
