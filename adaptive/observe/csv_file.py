"""A sink for spreadsheets and `pandas.read_csv`: a row for each step, a column for each number."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import lru_cache

from adaptive.base.errors import DriverError

from .events import StepEvent
from .line_file import LineSink
from .scalars import NOISE, describe, noise_of, scalars

_log = logging.getLogger("adaptive")


class CSV(LineSink):
    """A sink that appends a row for each step: its number, all its scalars, what happened in it, and the run's id.

        program.run(epochs=10, log=[ad.log.CSV("run.csv")])

    The file only grows, and a row that was cut has no id; so read it with
    `pandas.read_csv(path).dropna(subset="run_id").drop_duplicates(["run_id", "step"], keep="last")`.
    The first row of the file fixes the columns. A number of another name is left out, with a warning; `ad.log.JSONL`
    has all of them.

    Args:
      path: the file. Rows of other runs stay above those of this run; the column `run_id` distinguishes the runs.
      columns: names of numbers that come later, such as those of `program.evaluate(log="val")`: `["val.loss"]`.

    Raises:
      DriverError: `columns` is a text.
    """

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str] = ()):
        super().__init__(path)
        if isinstance(columns, str):
            raise DriverError(f"ad.log.CSV: columns= is a list of names:  columns=[{columns!r}]")
        self._later = columns
        self._columns: list[str] = []
        self._left_out: set[str] = set()

    def write(self, event: StepEvent) -> None:
        """Append a row."""
        row: dict[str, object] = {"step": 0}
        row |= {_unquoted(name): value for name, value in scalars(event).items()}
        row["step"] = event.report.step  # a metric may have this name, too
        noise = [] if noise_of(event) is None else [f"noise/{field}" for field in NOISE]
        for name in (*noise, *map(_unquoted, self._later)):  # unknown in the first steps
            row.setdefault(name, "")
        row |= {"notes": _unquoted("; ".join(describe(event))), "run_id": event.run_id}
        if self._file is None:
            if self._open():
                with self._path.open(encoding="utf-8") as lines:
                    self._columns = lines.readline().rstrip("\n").split(",")
            else:
                self._columns = [*row]
                self._append(",".join(row))
        if new := row.keys() - self._columns - self._left_out:
            self._left_out |= new
            _log.warning(
                "%s has no column for %s. In a new file, name it beforehand:  ad.log.CSV(path, columns=%s)",
                *(self._path, ", ".join(sorted(new)), sorted(new)),
            )
        self._append(",".join(str(row.get(name, "")) for name in self._columns))


@lru_cache(maxsize=1024)
def _unquoted(text: str) -> str:
    """Return a text in one cell without quotes: a quoted cell that was cut would swallow the rows below it."""
    return " ".join(text.translate(_REPLACED).split())


_REPLACED = str.maketrans({'"': "'", ",": ";"})
