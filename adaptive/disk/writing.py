"""Writes checkpoints with orbax's `CheckpointManager`. The only module that imports orbax, it is imported on use.

orbax names, commits and deletes folders. Its "step" is the number of a checkpoint in the order of writing. Arrays are
in one file, because a checkpoint by orbax's own handler takes 28 ms of processor time with 10 arrays and 64 ms with
100, most of it in Python, which delays the steps beside it. This takes 16 and 17 ms.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, LatestN

from adaptive.base.values.tree_paths import Name

from .best import KeepBest, best_of
from .folders import ARRAYS, ITEM, LEAVES, checkpoints, number


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
    this, own = 1 + max(map(number, checkpoints(directory)), default=0), jax.process_index()
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
    folder = directory / options.step_name_format.build_name(this)
    with ocp.CheckpointManager(directory, options=options, item_handlers={ITEM: _ArraysHandler()}) as manager:
        try:
            manager.save(this, args=ocp.args.Composite(**{ITEM: _SaveArrays(arrays)}), force=True)
        except Exception as error:
            if not folder.exists():
                raise
            logging.getLogger("adaptive").warning("%s is complete, but old ones cannot be deleted: %s", folder, error)
    return folder


class _ArraysHandler(ocp.CheckpointHandler):
    """Writes arrays to one file, and their paths to another. `read` reads them."""

    def save(self, directory: Any, args: _SaveArrays) -> None:
        leaves = [[name, array.dtype.name] for name, array in args.arrays.items()]
        (directory / LEAVES).write_text(json.dumps(leaves))
        with open(directory / ARRAYS, "wb") as file:
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
        return [found is not None and each.step == number(found) for each in infos]


class _Names(NamedTuple):
    """The names of checkpoints, as orbax's `NameFormat`."""

    step: int  # of the checkpoint to be written

    def build_name(self, step: int) -> str:
        return f"{step:06}-step-{self.step}"

    def find_all(self, base_path: Any) -> Iterator[Any]:
        found = checkpoints(Path(base_path))
        return (ocp.path.step.Metadata(step=number(path), path=base_path / path.name) for path in found)

    def find_step(self, base_path: Any, step: int) -> Any:
        return next(found for found in self.find_all(base_path) if found.step == step)
