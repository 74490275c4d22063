"""A sink for spreadsheets and `pandas.read_csv`: a row for each step, a column for each number."""

from __future__ import annotations

import csv
import os
from contextlib import suppress
from pathlib import Path
from typing import IO

from .events import StepEvent
from .figures import figures, words


class CSV:
    """A sink that writes a row for each step: its number, all its figures, and what happened in it.

        program.run(epochs=10, log=[ad.log.CSV("run.csv")])

    A column that is new (another metric, another worker) is added to the rows above it too, where it is empty: the file
    is written anew for that, under another name, and then takes the place of the old one.

    Args:
      path: the file; rows are added behind those of an earlier run.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._columns: list[str] = []
        self._file: IO[str] | None = None

    def write(self, event: StepEvent) -> None:
        """Add a row."""
        row: dict[str, object] = {"step": event.report.step, **figures(event), "notes": "; ".join(words(event))}
        if self._file is None:
            self._columns = _columns_of(self._path)
            self._open(row)
        elif not row.keys() <= self._known:
            self._file.close()
            self._open(row)
        assert self._file is not None
        self._writer.writerow([row.get(name, "") for name in self._columns])

    def _open(self, row: dict[str, object]) -> None:
        new = [name for name in row if name not in self._columns]
        if new and self._columns:
            _widen(self._path, [*self._columns, *new])
        if new and not self._columns:
            with self._path.open("w", newline="") as file:
                csv.writer(file).writerow(new)
        self._columns += new
        self._file = self._path.open("a", newline="")
        self._writer, self._known = csv.writer(self._file), set(self._columns)

    def flush(self) -> None:
        """What was written is on its way to the disk, whatever becomes of this process."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """End the file; a later run goes on behind it."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __repr__(self) -> str:
        return f"CSV({str(self._path)!r})"


def _columns_of(path: Path) -> list[str]:
    """Of a file that is there; none of one that is not. A last row that was cut by the end of its run is taken away."""
    if not path.is_file() or not path.stat().st_size:
        return []
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
    with path.open(newline="") as rows:
        return next(csv.reader(rows), [])


def _widen(path: Path, columns: list[str]) -> None:
    """Write a file anew with more columns."""
    new = path.with_name(f".{path.name}.wider")
    try:
        with path.open(newline="") as old, new.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="")
            writer.writeheader()
            writer.writerows(csv.DictReader(old))
        new.replace(path)
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)
