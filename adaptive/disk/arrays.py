"""Arrays in a folder, by orbax. The one file that knows it; it is imported when it is first needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    import orbax.checkpoint as ocp


def write(arrays: Mapping[str, np.ndarray], folder: Path) -> None:
    """Write arrays, none of them empty, to a folder that is not there yet. They are on the disk when this returns.

    Raises:
      Exception: whatever orbax and the libraries below it say where it cannot be done.
    """
    import orbax.checkpoint as ocp

    with _checkpointer() as checkpointer:
        as_they_are = {name: array.view(_NotCopied) for name, array in arrays.items()}
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(as_they_are))


def read(folder: Path) -> dict[str, np.ndarray]:
    """What `write` has written."""
    import orbax.checkpoint as ocp

    with _checkpointer() as checkpointer:
        metadata = checkpointer.metadata(folder.absolute()).item_metadata
        how = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in metadata.tree}
        found = checkpointer.restore(folder.absolute(), args=ocp.args.PyTreeRestore(restore_args=how))
    return {name: np.asarray(value) for name, value in found.items()}


class _NotCopied(np.ndarray):
    """An array that orbax need not copy before it writes it: nobody changes it meanwhile."""

    def __deepcopy__(self, memo: Any) -> _NotCopied:
        return self


def load_library() -> None:
    """Import orbax now, rather than beside a step."""
    import orbax.checkpoint  # noqa: F401


def _checkpointer() -> ocp.Checkpointer:
    """One for this process alone: where several train, one writes, and no other hears of it from orbax.

    Nothing is compressed: weights hardly shrink, and it would take the steps' cores for several times as long.
    """
    import orbax.checkpoint as ocp

    own = jax.process_index()
    alone: dict[str, Any] = {"primary_host": own, "active_processes": {own}, "barrier_sync_key_prefix": f"process{own}"}
    options = ocp.options.MultiprocessingOptions(**alone)
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)
