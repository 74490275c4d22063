"""Replace the contents of a log file atomically, and recognize a file that is unchanged since it was closed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple


@contextmanager
def rewritten(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that replaces `path` at the end of the `with` block, unless the block raises.

    A process that is killed before the end leaves the old file unchanged. Another process that still has the old file
    open cannot write to the new one.

    Raises:
      OSError: the directory cannot be written.
    """
    target = path.resolve()
    beside = target.with_name(f".{target.name}.rewritten")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(target, beside)
        beside.replace(target)
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


class Left(NamedTuple):
    """A log file as this process left it.

    Attributes:
      size: in bytes.
      run_id: the id of the run that was written last.
      step: the last step in the file.
      head: what the writer needs in order to append: the columns of a CSV file, the header of a record.
    """

    size: int
    run_id: str
    step: int
    head: Any


_left: dict[Path, Left] = {}


def note_left(path: Path, run_id: str, step: int, head: Any) -> None:
    """Remember a file that this process has just closed, so that the next `run()` need not read it."""
    with suppress(OSError):
        if path.is_file():
            _left[path.resolve()] = Left(path.stat().st_size, run_id, step, head)


def as_left(path: Path, run_id: str, step: int) -> Left | None:
    """Return the notes on a file if it still ends with this step of this run; None if the file has to be read."""
    left = _left.get(path.resolve())
    if left is None or (left.run_id, left.step) != (run_id, step) or not path.is_file():
        return None
    return left if path.stat().st_size == left.size else None
