"""A directory of checkpoints, written and read by orbax. The only module that imports it, on first use.

    run/000012-step-400/            the twelfth, of step 400, by orbax's `CheckpointManager`: the item "state" has the
                                    arrays, and the item "run" everything else, as JSON
    run/*.orbax-checkpoint-tmp/     being written, or left by a writer that was killed; never read
    run/writer.lock                 the current writer (`lock.py`)
    run/run.json                    the id of the run that owns the directory

The newest checkpoint is the one written last, not the one with the largest step: a run that restarts from step 200
abandons the steps up to 400. So orbax's "step" is the number in the order of writing.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from adaptive.base.errors import CheckpointError

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_UNFINISHED = "*.orbax-checkpoint-tmp*"
_RUN = "run.json"
_log = logging.getLogger("adaptive")
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")


def checkpoints(directory: Path) -> list[Path]:
    """Return the folders of all checkpoints, unreadable ones included, the newest first.

    Raises:
      OSError: the directory cannot be read.
    """
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_number, reverse=True)


def _number(path: Path) -> int:
    return int(path.name.partition("-")[0])


def belongs_to(path: Path) -> Path:
    """Return the directory that holds a checkpoint; any other path is returned unchanged."""
    return path.parent if _NAME.fullmatch(path.name) and path.is_dir() else path


def run_of(directory: Path) -> str:
    """Return the id of the run that owns a directory, or ""."""
    try:
        return str(json.loads((directory / _RUN).read_bytes())["run_id"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def record_owner(directory: Path, run_id: str) -> None:
    """Record the run that owns a directory. The caller holds the lock.

    Raises:
      OSError: the directory is not writable.
    """
    if run_of(directory) != run_id:
        (directory / _RUN).write_text(json.dumps({"run_id": run_id}))


def sweep(directory: Path) -> None:
    """Delete what writers have left unfinished. The caller holds the lock."""
    for path in directory.glob(_UNFINISHED):
        shutil.rmtree(path, ignore_errors=True)


class CheckpointFolders:
    """Writes checkpoints to an existing directory, and deletes old ones. The caller holds the directory's lock.

    Args:
      keep: number of checkpoints to keep.
    """

    def __init__(self, directory: Path, keep: int):
        import orbax.checkpoint as ocp
        from orbax.checkpoint.checkpoint_managers import LatestN

        sweep(directory)
        self._directory, self._names = directory, _Names()
        options = ocp.CheckpointManagerOptions(
            create=False,
            step_name_format=self._names,
            preservation_policy=LatestN(keep),
            enable_async_checkpointing=False,  # our thread writes
            save_root_metadata=False,
            lightweight_initialize=True,
            multiprocessing_options=_alone(),
        )
        self._manager = ocp.CheckpointManager(directory, options=options, item_handlers=_handlers())

    def write(self, step: int, arrays: Mapping[str, np.ndarray], run: Mapping[str, Any]) -> Path:
        """Write a checkpoint; its folder gets its name when it is complete. If this raises, use a new object.

        Args:
          arrays: non-empty arrays by name, which do not change meanwhile.
          run: everything else, as JSON stores it.

        Returns:
          The checkpoint's folder.

        Raises:
          OSError: the system refuses the write, such as for a full disk.
          Exception: another error of orbax or its libraries.
        """
        import orbax.checkpoint as ocp

        number = 1 + max(map(_number, checkpoints(self._directory)), default=0)
        self._names.step = step
        items: dict[str, Any] = {"run": ocp.args.JsonSave(dict(run))}
        if arrays:
            items["state"] = ocp.args.PyTreeSave({name: array.view(_NotCopied) for name, array in arrays.items()})
        folder = self._directory / self._names.build_name(number)
        try:
            with _errors_are_raised_only():
                self._manager.save(number, args=ocp.args.Composite(**items), force=True)
        except Exception as error:
            if not folder.exists():
                raise
            _log.warning("the checkpoint %s is complete, but older ones could not be deleted: %s", folder, error)
        return folder

    def close(self) -> None:
        """Release what orbax holds."""
        self._manager.close()


def read(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return what `CheckpointFolders.write` wrote: the arrays, and the rest.

    Raises:
      CheckpointError: an earlier version of this library wrote it.
      Exception: any error of orbax or its libraries: it is damaged, or was deleted meanwhile.
    """
    import orbax.checkpoint as ocp

    if (folder / "program.json").exists():
        raise CheckpointError(
            f"{folder} is of an earlier format. The last commit of adaptive-dataflow that reads it is 6204c98a: "
            "restore it with that, and store the result of program.checkpoint() by pickle."
        )
    alone = _alone()
    both = ocp.CompositeCheckpointHandler(
        **_handlers(), composite_options=ocp.CompositeOptions(multiprocessing_options=alone)
    )
    with _errors_are_raised_only(), ocp.Checkpointer(both, multiprocessing_options=alone) as checkpointer:
        run = checkpointer.restore(folder, args=ocp.args.Composite(run=ocp.args.JsonRestore())).run
        if not run["arrays"]:
            return {}, run
        how = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in run["arrays"]}
        items = ocp.args.Composite(state=ocp.args.PyTreeRestore(restore_args=how))
        state = checkpointer.restore(folder, args=items).state
    return {name: np.asarray(value) for name, value in state.items()}, run


def load_library() -> None:
    """Import orbax now, rather than beside a step."""
    import orbax.checkpoint  # noqa: F401


class _Names:
    """The names of checkpoints, as orbax's `NameFormat`; `step` is that of the one to be written."""

    step = 0

    def build_name(self, step: int) -> str:
        return f"{step:06}-step-{self.step}"

    def find_all(self, base_path: Any) -> Iterator[Any]:
        import orbax.checkpoint as ocp

        found = checkpoints(Path(base_path))
        return (ocp.path.step.Metadata(step=_number(path), path=base_path / path.name) for path in found)

    def find_step(self, base_path: Any, step: int) -> Any:
        for found in self.find_all(base_path):
            if found.step == step:
                return found
        raise ValueError(f"{base_path} holds no checkpoint {step}")


def _alone() -> Any:
    """Return orbax's options for a process alone, without barriers between the processes of `jax.distributed`."""
    import orbax.checkpoint as ocp

    own = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process{own}"
    )


def _handlers() -> dict[str, Any]:
    """Return the handlers of a checkpoint's items.

    Nothing is compressed: weights hardly shrink, and compression would occupy the cores for several times as long.
    """
    import orbax.checkpoint as ocp

    alone = _alone()
    return {
        "state": ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=alone),
        "run": ocp.JsonCheckpointHandler(multiprocessing_options=alone),
    }


class _NotCopied(np.ndarray):
    """An array that orbax need not copy before writing, because it doesn't change meanwhile."""

    def __deepcopy__(self, memo: Any) -> _NotCopied:
        return self


@contextmanager
def _errors_are_raised_only() -> Iterator[None]:
    """Raise errors, and keep orbax from logging them besides, in each of its threads. After an error it stays silent,
    because some of its threads are still at work.
    """
    absl = logging.getLogger("absl")
    absl.addFilter(_not_of_orbax)
    try:
        yield
    except Exception as error:
        code = _OS_ERROR.search(str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error
    absl.removeFilter(_not_of_orbax)


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname
