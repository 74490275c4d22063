"""A file to which whole lines are appended."""

from __future__ import annotations

import os
from pathlib import Path


class LineFile:
    """A log file that only grows, by whole lines: each is one write, so a process that is killed rarely leaves a part.

    If the last line of an existing file was cut, as by a full disk, the next one begins a line of its own.

    Args:
      path: the file; created if it is missing.

    Raises:
      OSError: the file cannot be written.
    """

    def __init__(self, path: Path):
        self._file = path.open("ab", buffering=0)
        self.empty = True
        if path.is_file() and path.stat().st_size:
            self.empty = False
            with path.open("rb") as before:
                before.seek(-1, os.SEEK_END)
                if before.read() != b"\n":
                    self.write("")

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
