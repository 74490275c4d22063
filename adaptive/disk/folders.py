"""A directory of checkpoints, as files.

    run/000012-step-400/            the twelfth, of step 400
        state/arrays.npy            its arrays and numbers, one after another, as `numpy.save` writes them
        state/leaves.json           the path and dtype of each
        values.json                 the value by which it is compared with others, if there is one (`best.py`)
    run/*.orbax-checkpoint-tmp/     being written, or left by a writer that was killed; never read
    run/writer.lock                 locked by the current writer (`lock.py`)

The newest checkpoint is the one written last, not the one with the largest step: a run that restarts from step 200
abandons the steps up to 400. So folders are numbered in the order of writing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adaptive.base.errors import CheckpointError
from adaptive.base.values.tree_paths import Name, by_name

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
ITEM, ARRAYS, LEAVES = "state", "arrays.npy", "leaves.json"


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
    return sorted(found, key=number, reverse=True)


def number(folder: Path) -> int:
    """Return the number of a checkpoint in the order of writing."""
    return int(folder.name.partition("-")[0])


def arrays_of(checkpoint: Mapping[str, Any]) -> dict[Name, np.ndarray]:
    """Return the arrays and numbers of a checkpoint by path. Raises a CheckpointError if a leaf cannot be stored."""
    arrays = {name: np.asarray(leaf.value) for name, leaf in by_name(checkpoint, "checkpoint").items()}
    wrong = [name for name, array in arrays.items() if array.dtype.hasobject]
    if wrong:
        raise CheckpointError(f"{'.'.join(wrong[0])} cannot be stored on disk: only arrays, numbers and text can be.")
    return arrays


def read(folder: Path) -> dict[str, Any]:
    """Return a checkpoint as `program.checkpoint()` returned it, with dicts for all containers.

    Raises:
      CheckpointError: it cannot be read.
    """
    if (folder / "program.json").exists():
        raise CheckpointError(
            f"{folder} is of an earlier format. The last commit of adaptive-dataflow that reads it is 6204c98a: "
            "restore it with that, and store the result of program.checkpoint() by pickle."
        )
    checkpoint: dict[str, Any] = {"state": {}, "slots": {}, "hooks": {}}
    try:
        with open(folder / ITEM / ARRAYS, "rb") as file:
            for (*way, last), dtype in json.loads((folder / ITEM / LEAVES).read_bytes()):
                parent = checkpoint
                for part in way:
                    parent = parent.setdefault(part, {})
                # numpy stores the dtypes that JAX adds to its own, such as bfloat16, as bytes without a meaning
                array = np.load(file)
                parent[last] = array.view(dtype) if array.dtype.kind == "V" else array
    except Exception as error:  # of any library, since anything may be damaged
        why = str(error).partition("\n")[0][:300]
        raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {why}") from error
    return checkpoint
