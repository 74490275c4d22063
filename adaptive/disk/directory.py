"""A directory of checkpoints: each a folder, numbered in the order in which they were written.

    run/000012-step-400/    the twelfth, of step 400
    run/.unfinished-…/      being written; or left by a writer that was killed, and never read
    run/writer.lock         who writes (`lock.py`)
    run/run.json            whose checkpoints these are, or will be: the run's id

The newest is the one that was written last, and not the one of the largest step: who goes on from step 200 has left the
course that led to step 400.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .whole import SEAL, DamagedError, check, seal, to_disk, write_through

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_UNFINISHED = ".unfinished-"
_RUN = "run.json"


class Whole(NamedTuple):
    """A checkpoint that was found whole.

    Attributes:
      seal: a digest; equal where checkpoints are.
      notes: on newer ones that are not whole.
    """

    path: Path
    seal: str
    notes: tuple[str, ...]


def checkpoints(directory: Path) -> list[Path]:
    """All of them, whole or not; the newest first.

    Raises:
      OSError: the directory cannot be read.
    """
    if not directory.is_dir():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def belongs_to(path: Path) -> Path:
    """The directory that a checkpoint is in; a path that is no checkpoint's is its own."""
    return path.parent if _NAME.fullmatch(path.name) and path.is_dir() else path


def run_of(directory: Path) -> str:
    """Return the id of the run that writes to a directory; "" if none has begun to."""
    try:
        run_id = json.loads((directory / _RUN).read_bytes())["run_id"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return run_id if isinstance(run_id, str) else ""


def claim(directory: Path, run_id: str) -> None:
    """Note whose checkpoints a directory holds, or will hold. For who holds the lock.

    Raises:
      OSError: the directory cannot be written.
    """
    if run_of(directory) != run_id:
        write_through(directory / _RUN, json.dumps({"run_id": run_id}).encode())


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's name; None for a folder of another name."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match[2])


def newest_whole(path: Path, fits: Callable[[Path], None] = lambda _: None) -> Whole | None:
    """Return the newest checkpoint of a directory that is whole, or the one that `path` itself is; None if there is
    none at all. A checkpoint that a live writer deletes meanwhile is not there.

    Args:
      fits: raises DamagedError where a checkpoint that is whole cannot be used.

    Raises:
      DamagedError: there are, and none is whole.
      OSError: the directory cannot be read.
    """
    notes: list[str] = []
    gone = False
    for each in [path] if belongs_to(path) != path else checkpoints(path):
        try:
            digest = check(each)
            fits(each)
            return Whole(each, digest, tuple(notes))
        except DamagedError as error:
            if each.is_dir():
                notes.append(f"the checkpoint {each.name} is passed over: {error}")
            gone = gone or not each.is_dir()
    if gone:  # a writer deletes a checkpoint when it has finished newer ones
        return newest_whole(path, fits)
    if notes:
        raise DamagedError("\n".join(notes))
    return None


def commit(directory: Path, step: int, fill: Callable[[Path], None], may: Callable[[], None]) -> Path:
    """Write a checkpoint: all of it is there at once, or nothing is.

    Args:
      fill: writes its files into a folder.
      may: raises if it is not for this process to write any more.

    Returns:
      Its folder.
    """
    unfinished = directory / f"{_UNFINISHED}{uuid.uuid4().hex}"
    try:
        unfinished.mkdir()
        fill(unfinished)
        seal(unfinished)
        may()
        number = 1 + max((int(path.name.partition("-")[0]) for path in checkpoints(directory)), default=0)
        path = directory / f"{number:06}-step-{step}"
        unfinished.rename(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)  # the room that it took may be what is missing
        raise
    to_disk(directory)
    return path


def prune(directory: Path, keep: int) -> None:
    """Delete what is older than the newest `keep` that have been finished."""
    finished = [path for path in checkpoints(directory) if (path / SEAL).exists()]
    if len(finished) > keep:
        oldest = checkpoints(directory).index(finished[keep - 1])
        for path in checkpoints(directory)[oldest + 1 :]:
            going = directory / f"{_UNFINISHED}{uuid.uuid4().hex}"
            path.rename(going)  # half of one is not to be taken for one that is damaged
            shutil.rmtree(going, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Delete what writers that were killed have left. For who holds the lock."""
    for path in directory.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)
