"""A directory of checkpoints, written by orbax's `CheckpointManager`. The only module that imports orbax; it is itself
imported on use.

    run/000012-step-400/            the twelfth, of step 400
        state/arrays.npy            its arrays and numbers, one after another, as `numpy.save` writes them
        state/leaves.json           the path and dtype of each
        values.json                 the value by which it is compared with others, if there is one (`best.py`)
    run/*.orbax-checkpoint-tmp/     being written, or left by a writer that was killed; never read
    run/writer.lock                 locked by the current writer (`lock.py`)

The newest checkpoint is the one written last, not the one with the largest step: a run that restarts from step 200
abandons the steps up to 400. So orbax's "step" is the number in the order of writing.

Arrays are in one file, because a checkpoint by orbax's own handler takes 28 ms of processor time with 10 arrays and 64
ms with 100, most of it in Python, which delays the steps beside it. This takes 16 and 17 ms.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, LatestN

from adaptive.base.errors import CheckpointError
from adaptive.base.values.tree_paths import Name, by_name

from .best import KeepBest, best_of

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_ITEM, _ARRAYS, _LEAVES = "state", "arrays.npy", "leaves.json"


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
      Exception: any error of the system, orbax or its libraries.
    """
    number, own = 1 + max(map(_number, checkpoints(directory)), default=0), jax.process_index()
    options = ocp.CheckpointManagerOptions(
        create=False,
        step_name_format=_Names(step),
        preservation_policy=AnyPreservationPolicy(
            [LatestN(keep)] if keep_best is None else [LatestN(keep), _Best(directory, keep_best)]
        ),
        cleanup_tmp_directories=True,
        enable_async_checkpointing=False,  # our thread writes
        save_root_metadata=False,
        multiprocessing_options=ocp.options.MultiprocessingOptions(  # no barriers between processes of jax.distributed
            primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process{own}"
        ),
    )
    folder = directory / options.step_name_format.build_name(number)
    with ocp.CheckpointManager(directory, options=options, item_handlers={_ITEM: _ArraysHandler()}) as manager:
        try:
            manager.save(number, args=ocp.args.Composite(**{_ITEM: _SaveArrays(arrays)}), force=True)
        except Exception as error:
            if not folder.exists():
                raise
            logging.getLogger("adaptive").warning("%s is complete, but old ones cannot be deleted: %s", folder, error)
    return folder


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
        with open(folder / _ITEM / _ARRAYS, "rb") as file:
            for (*way, last), dtype in json.loads((folder / _ITEM / _LEAVES).read_bytes()):
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


class _ArraysHandler(ocp.CheckpointHandler):
    """Writes arrays to one file, and their paths to another. `read` reads them."""

    def save(self, directory: Any, args: _SaveArrays) -> None:
        leaves = [[name, array.dtype.name] for name, array in args.arrays.items()]
        (directory / _LEAVES).write_text(json.dumps(leaves))
        with open(directory / _ARRAYS, "wb") as file:
            try:
                for array in args.arrays.values():
                    np.save(file, array, allow_pickle=False)
            except OSError as error:  # numpy says how much was written, and not why
                raise OSError(f"{error}. Is the disk full?") from error
            file.flush()
            os.fsync(file.fileno())

    def restore(self, directory: Any, args: Any = None) -> None:
        raise NotImplementedError


@ocp.args.register_with_handler(_ArraysHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _SaveArrays(ocp.args.CheckpointArgs):
    arrays: Mapping[Name, np.ndarray]


class _Best(NamedTuple):
    """Keeps the checkpoint with the best value: a preservation policy of orbax."""

    directory: Path
    keep_best: KeepBest

    def should_preserve(self, infos: Sequence[Any], *, context: Any) -> list[bool]:
        found = best_of(reversed(checkpoints(self.directory)), self.keep_best)
        return [found is not None and each.step == _number(found) for each in infos]


class _Names(NamedTuple):
    """The names of checkpoints, as orbax's `NameFormat`."""

    step: int  # of the checkpoint to be written

    def build_name(self, step: int) -> str:
        return f"{step:06}-step-{self.step}"

    def find_all(self, base_path: Any) -> Iterator[Any]:
        found = checkpoints(Path(base_path))
        return (ocp.path.step.Metadata(step=_number(path), path=base_path / path.name) for path in found)

    def find_step(self, base_path: Any, step: int) -> Any:
        return next(found for found in self.find_all(base_path) if found.step == step)
