"""A sink that appends whole lines to a file."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path


class LineSink:
    """A log file that only grows, by whole lines: each is one write, so a process that is killed rarely leaves a part.
    After a line that was cut, as by a full disk, the next one begins a line of its own.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._file: FileIO | None = None

    def _open(self) -> bool:
        """Open the file. Returns whether it has lines."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file, before = self._path.open("ab", buffering=0), b""
        if self._path.is_file() and self._path.stat().st_size:
            with self._path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                before = file.read()
        if before not in (b"", b"\n"):
            self._append("")
        return bool(before)

    def _append(self, line: str) -> None:
        """Append a line, which has no line ends."""
        assert self._file is not None
        rest = memoryview(line.encode("utf-8") + b"\n")
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Close the file; a later run adds lines to it."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._path)!r})"
