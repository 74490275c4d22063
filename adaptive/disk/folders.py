"""A directory of checkpoints.

    run/000012-step-400/            the twelfth, of step 400
        arrays.npy                  its arrays and numbers, one after another, as `numpy.save` writes them
        leaves.json                 the path and dtype of each
        values.json                 the value by which it is compared with others, if there is one (`best.py`)
    run/*.unfinished/               being written or deleted, or left by a writer that was killed; never read
    run/writer.lock                 locked by the current writer (`lock.py`)

The newest checkpoint is the one written last, not the one with the largest step: a run that restarts from step 200
abandons the steps up to 400. So folders are numbered in the order of writing.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adaptive.base.errors import CheckpointError
from adaptive.base.values.tree_paths import Name, by_name

from .best import KeepBest, best_of

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_ARRAYS, _LEAVES, _UNFINISHED = "arrays.npy", "leaves.json", ".unfinished"


def checkpoints(path: Path) -> list[Path]:
    """Return the folders of all checkpoints in a directory, unreadable ones included, the newest first; or `path`
    itself, if it is a checkpoint.

    Raises:
      OSError: the directory cannot be read.
    """
    if not path.is_dir():
        return []
    if _NAME.fullmatch(path.name):
        return [path]
    found = [each for each in path.iterdir() if _NAME.fullmatch(each.name) and each.is_dir()]
    return sorted(found, key=_number, reverse=True)


def _number(folder: Path) -> int:
    return int(folder.name.partition("-")[0])


def arrays_of(checkpoint: Mapping[str, Any]) -> dict[Name, np.ndarray]:
    """Return the arrays and numbers of a checkpoint by path. Raises a CheckpointError if a leaf cannot be stored."""
    arrays = {name: np.asarray(leaf.value) for name, leaf in by_name(checkpoint, "checkpoint").items()}
    wrong = [name for name, array in arrays.items() if array.dtype.hasobject]
    if wrong:
        raise CheckpointError(f"{'.'.join(wrong[0])} cannot be stored on disk: only arrays, numbers and text can be.")
    return arrays


def write(
    directory: Path, keep: int, step: int, arrays: Mapping[Name, np.ndarray], keep_best: KeepBest | None = None
) -> Path:
    """Write a checkpoint, which gets its name when it is complete; then delete old ones. The caller holds the lock.

    Args:
      keep: number of checkpoints to keep.
      keep_best: which one to keep besides these.

    Returns:
      Its folder.

    Raises:
      OSError: it cannot be written.
    """
    for left in directory.glob("*" + _UNFINISHED):
        shutil.rmtree(left, ignore_errors=True)
    before = checkpoints(directory)
    folder = directory / f"{1 + max(map(_number, before), default=0):06}-step-{step}"
    new = _unfinished(folder)
    new.mkdir()
    try:
        (new / _LEAVES).write_text(json.dumps([[name, array.dtype.name] for name, array in arrays.items()]))
        with open(new / _ARRAYS, "wb") as file:
            try:
                for array in arrays.values():
                    np.save(file, array, allow_pickle=False)
            except OSError as error:  # numpy says how much was written, and not why
                raise OSError(f"{error}. Is the disk full?") from error
            file.flush()
            os.fsync(file.fileno())
        new.rename(folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    best = best_of(reversed([folder, *before]), keep_best) if keep_best else None
    try:
        for old in before[keep - 1 :]:
            if old != best:
                shutil.rmtree(old.rename(_unfinished(old)))
    except OSError as error:
        logging.getLogger("adaptive").warning("%s is complete, but old ones cannot be deleted: %s", folder, error)
    return folder


def _unfinished(folder: Path) -> Path:
    return folder.with_name(folder.name + _UNFINISHED)


def read(folder: Path) -> dict[str, Any]:
    """Return a checkpoint as `program.checkpoint()` returned it, with dicts for all containers.

    Raises:
      CheckpointError: it cannot be read.
    """
    checkpoint: dict[str, Any] = {"state": {}, "slots": {}, "hooks": {}}
    try:
        with open(folder / _ARRAYS, "rb") as file:
            for (*way, last), dtype in json.loads((folder / _LEAVES).read_bytes()):
                parent = checkpoint
                for part in way:
                    parent = parent.setdefault(part, {})
                # numpy stores the dtypes that JAX adds to its own, such as bfloat16, as bytes without a meaning
                array = np.load(file)
                parent[last] = array.view(dtype) if array.dtype.kind == "V" else array
    except Exception as error:  # of any kind, since anything may be damaged
        why = str(error).partition("\n")[0][:300]
        raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {why}") from error
    return checkpoint
