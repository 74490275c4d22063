"""A file to which whole lines are appended."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO


class LineFile:
    """A log file that only grows, by whole lines: each is one write, so a process that is killed leaves no part of one.

    A last line that was cut, as by a full disk, is removed when the file is opened.

    Args:
      path: the file; created if it is missing.

    Raises:
      OSError: the file cannot be written.
    """

    def __init__(self, path: Path):
        self._file = path.open("ab", buffering=0)
        if path.is_file() and (size := path.stat().st_size):
            with path.open("rb") as before:
                os.truncate(path, _end_of_lines(before, size))

    @property
    def empty(self) -> bool:
        """Whether the file has no lines."""
        return os.fstat(self._file.fileno()).st_size == 0

    def write(self, line: str) -> None:
        """Append a line, which has no line ends.

        Raises:
          OSError: the disk is full, or cannot be written.
        """
        rest = memoryview(line.encode("utf-8") + b"\n")
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _end_of_lines(file: IO[bytes], size: int) -> int:
    """Return the size of a file up to its last line end."""
    end = size
    while end:
        begin = max(0, end - (1 << 16))
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0
