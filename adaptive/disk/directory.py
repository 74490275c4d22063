"""A directory of checkpoints: one folder each, numbered in the order of writing.

    run/000012-step-400/    the twelfth, of step 400
    run/.unfinished-…/      being written, or left by a writer that was killed; never read
    run/writer.lock         the current writer (`lock.py`)
    run/run.json            the id of the run that owns the directory

The newest checkpoint is the one written last, not the one with the largest step: a run that restarts from step 200
abandons the steps up to 400.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .manifest import MANIFEST, DamagedError, sync_folder, verify, write_manifest, write_through

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_UNFINISHED = ".unfinished-"
_RUN = "run.json"


class VerifiedCheckpoint(NamedTuple):
    """A checkpoint whose files match its manifest.

    Attributes:
      seal: digest of the manifest; equal for equal checkpoints.
      notes: one line for each newer checkpoint that is damaged.
    """

    path: Path
    seal: str
    notes: tuple[str, ...]


def checkpoints(directory: Path) -> list[Path]:
    """Return the folders of all checkpoints, damaged ones included, the newest first.

    Raises:
      OSError: the directory cannot be read.
    """
    if not directory.is_dir():
        return []
    named = [(match, path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    found = [(int(match[1]), path) for match, path in named]
    return [path for _, path in sorted(found, reverse=True)]


def belongs_to(path: Path) -> Path:
    """Return the directory that holds a checkpoint; any other path is returned unchanged."""
    return path.parent if _NAME.fullmatch(path.name) and path.is_dir() else path


def run_of(directory: Path) -> str:
    """Return the id of the run that owns a directory, or ""."""
    try:
        run_id = json.loads((directory / _RUN).read_bytes())["run_id"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return run_id if isinstance(run_id, str) else ""


def record_owner(directory: Path, run_id: str) -> None:
    """Record the run that owns a directory. The caller holds the lock.

    Raises:
      OSError: the directory is not writable.
    """
    if run_of(directory) != run_id:
        write_through(directory / _RUN, json.dumps({"run_id": run_id}).encode())


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's name; None for a folder of another name."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match[2])


def newest_verified(path: Path, fits: Callable[[Path], None] = lambda _: None) -> VerifiedCheckpoint | None:
    """Return the newest undamaged checkpoint of a directory, or the checkpoint at `path` itself; `None` without any.

    Skips checkpoints that a live writer deletes meanwhile.

    Args:
      fits: raises DamagedError for an undamaged checkpoint that cannot be used.

    Raises:
      DamagedError: there are checkpoints, and all are damaged.
      OSError: the directory cannot be read.
    """
    notes: list[str] = []
    gone = False
    for each in [path] if belongs_to(path) != path else checkpoints(path):
        try:
            digest = verify(each)
            fits(each)
            return VerifiedCheckpoint(each, digest, tuple(notes))
        except DamagedError as error:
            if each.is_dir():
                notes.append(f"the checkpoint {each.name} is skipped: {error}")
            gone = gone or not each.is_dir()
    if gone:  # a writer deletes a checkpoint when it has finished newer ones
        return newest_verified(path, fits)
    if notes:
        raise DamagedError("\n".join(notes))
    return None


def commit(directory: Path, step: int, fill: Callable[[Path], None], may: Callable[[], None]) -> Path:
    """Write a checkpoint atomically.

    Args:
      fill: writes the files into a folder.
      may: raises if this process has lost the right to write.

    Returns:
      The checkpoint's folder.
    """
    unfinished = directory / f"{_UNFINISHED}{uuid.uuid4().hex}"
    try:
        unfinished.mkdir()
        fill(unfinished)
        write_manifest(unfinished)
        may()
        number = 1 + max((int(path.name.partition("-")[0]) for path in checkpoints(directory)), default=0)
        path = directory / f"{number:06}-step-{step}"
        unfinished.rename(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)  # frees space, if the disk is full
        raise
    sync_folder(directory)
    return path


def prune(directory: Path, keep: int) -> None:
    """Delete the checkpoints older than the newest `keep` finished ones."""
    finished = [path for path in checkpoints(directory) if (path / MANIFEST).exists()]
    if len(finished) > keep:
        oldest = checkpoints(directory).index(finished[keep - 1])
        for path in checkpoints(directory)[oldest + 1 :]:
            going = directory / f"{_UNFINISHED}{uuid.uuid4().hex}"
            path.rename(going)  # a half-deleted folder must not look damaged
            shutil.rmtree(going, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Delete unfinished folders that killed writers left. The caller holds the lock."""
    for path in directory.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)
