"""A sink for spreadsheets and `pandas.read_csv`: a row for each step, a column for each number."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from .events import StepEvent
from .rewriting import as_left, note_left, rewritten
from .scalars import describe, scalars
from .sinks import Resumption

_RUN_ID = "run_id"


class CSV:
    """A sink that writes a row for each step: its number, all its scalars, what happened in it, and the run's id.

        program.run(epochs=10, log=[ad.log.CSV("run.csv")])

    The file holds one row per step of a run: when the run resumes from an earlier step, the rows of later steps are
    removed. A new column (another metric, another worker) is added to the earlier rows too, with empty cells. Both
    write a new file under another name, which then replaces the old one.

    Args:
      path: the file. Rows of other runs stay above those of this run; the column `run_id` distinguishes the runs.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._columns: list[str] = []
        self._file: IO[str] | None = None
        self._ready = False  # whether the file holds whole rows only, and none that the run will write again
        self._last: tuple[str, int] | None = None  # run and step of the last row

    def resume(self, resumption: Resumption) -> None:
        """Remove the rows of this run's later steps."""
        self.close()
        left = as_left(self._path, resumption.run_id, resumption.step)
        if left is None:
            self._columns = _columns_of(self._path, lambda row: _stands(row, resumption))
        else:
            self._columns = list(left.head)
        self._ready = True

    def write(self, event: StepEvent) -> None:
        """Add a row."""
        row: dict[str, object] = {"step": event.report.step, **scalars(event)}
        row |= {"notes": "; ".join(describe(event)), _RUN_ID: event.run_id}
        if self._file is None:
            if not self._ready:
                self._columns = _columns_of(self._path)
            self._open(row)
        elif not row.keys() <= self._known:
            self._file.close()
            self._open(row)
        assert self._file is not None
        self._writer.writerow([row.get(name, "") for name in self._columns])
        self._last = event.run_id, event.report.step

    def _open(self, row: dict[str, object]) -> None:
        new = [name for name in row if name not in self._columns]
        if new and self._columns:
            _widen(self._path, [*self._columns, *new])
        if new and not self._columns:
            with self._path.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow(new)
        self._columns += new
        self._file = self._path.open("a", newline="", encoding="utf-8")
        self._writer, self._known = csv.writer(self._file), set(self._columns)

    def flush(self) -> None:
        """Pass what was written to the operating system, so that it survives this process."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the file; a later run adds rows to it."""
        file, self._file, self._ready = self._file, None, False
        if file is not None:
            file.close()
            if self._last is not None:
                note_left(self._path, *self._last, tuple(self._columns))

    def __repr__(self) -> str:
        return f"CSV({str(self._path)!r})"


def _stands(row: dict[str, str], resumption: Resumption) -> bool:
    """Return whether a row is kept: it belongs to another run, or to a step that is not repeated."""
    if row.get(_RUN_ID) != resumption.run_id:
        return True
    return row["step"].isdecimal() and int(row["step"]) <= resumption.step


def _columns_of(path: Path, stands: Callable[[dict[str, str]], bool] = lambda _: True) -> list[str]:
    """Return the columns of a file; an empty list if the file is missing or empty.

    Removes the rows for which `stands` returns False, and a last row that was cut when its process was killed.
    """
    if not path.is_file() or not path.stat().st_size:
        return []
    with _reading(path) as file:
        records = _records(file)
        columns = _cells(next(records, ""))
        whole = all(text.endswith("\n") and stands(_as_row(columns, text)) for text in records)
        whole = whole and bool(columns)
    if not whole:
        with _reading(path) as file, rewritten(path) as new:
            records = _records(file)
            new.write(_encoded(next(records)) if columns else b"")
            for text in records:
                if text.endswith("\n") and stands(_as_row(columns, text)):
                    new.write(_encoded(text))
    return columns


def _reading(path: Path) -> IO[str]:
    """Open a file that may end in the middle of a character."""
    return path.open(newline="", encoding="utf-8", errors="surrogateescape")


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _records(file: IO[str]) -> Iterator[str]:
    """Yield the text of each row, header included. A last row that was cut has no line end."""
    text = ""
    for line in file:
        text += line
        if text.count('"') % 2 == 0 and text.endswith("\n"):
            yield text
            text = ""
    if text:
        yield text.removesuffix("\n")  # an unclosed quote


def _cells(text: str) -> list[str]:
    return next(csv.reader(io.StringIO(text, newline="")), []) if text.endswith("\n") else []


def _as_row(columns: list[str], text: str) -> dict[str, str]:
    return dict(zip(columns, _cells(text), strict=False))


def _widen(path: Path, columns: list[str]) -> None:
    """Rewrite a file with more columns, which are empty in the existing rows."""
    with _reading(path) as old, rewritten(path) as file:
        text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="", write_through=True)
        writer = csv.DictWriter(text, columns, restval="")
        writer.writeheader()
        writer.writerows(csv.DictReader(old))
        text.detach()
