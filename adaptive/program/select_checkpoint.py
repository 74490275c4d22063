"""Selection of the checkpoint to restore: rank 0 selects, and all other ranks read the same one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from adaptive.base.errors import CheckpointError
from adaptive.base.roster import broadcast_bytes
from adaptive.base.world import World
from adaptive.disk.folders import belongs_to, run_of

from .checkpoints import Checkpoints, FoundCheckpoint, NoneThereError, newest_readable, path_of
from .stored import load


class SelectedCheckpoint(NamedTuple):
    """The checkpoint to restore, if there is one.

    Attributes:
      checkpoint: its content; `None` if the directory has no checkpoint and that is allowed.
      directory: the directory that holds it.
      notes: notes on newer checkpoints that were skipped. Replicated.
      run_id: the id of the run that owns a directory without a checkpoint; "" if there is none.
    """

    checkpoint: dict[str, Any] | None
    directory: Path
    notes: list[str]
    run_id: str = ""


def select_checkpoint(world: World, where: Any, missing_ok: bool, about: str) -> SelectedCheckpoint:
    """Select the checkpoint to restore, and read it. Communicates; all processes call it.

    Args:
      where: a directory of checkpoints, or one checkpoint in such a directory.
      missing_ok: whether the directory may hold no checkpoint.
      about: the purpose, for errors.

    Raises:
      CheckpointError: no checkpoint can be read; or this process cannot read the one that rank 0 selected.
    """
    path = where.path if isinstance(where, Checkpoints) else path_of(where)
    own: FoundCheckpoint | None = None

    def select() -> bytes:
        nonlocal own
        try:
            own = newest_readable(path)
        except NoneThereError:
            if missing_ok:
                return json.dumps(run_of(path)).encode()
            raise
        return json.dumps([own.folder.relative_to(path).as_posix(), own.notes]).encode()

    before, failed = None, None
    while True:
        said = json.loads(broadcast_bytes(world, select, f"choosing the checkpoint for the {about}"))
        if isinstance(said, str):
            return SelectedCheckpoint(None, path, [], said)
        if failed is not None and said == before:
            raise failed
        folder, before, failed = path / said[0], said, None
        if own is None or own.folder != folder:
            try:
                own = FoundCheckpoint(folder, load(folder), ())
            except CheckpointError as error:
                failed = CheckpointError(
                    f"rank {world.rank} cannot read {folder}, which rank 0 selected: {error} All ranks read the same "
                    "checkpoint: keep it in a directory that all hosts see."
                )
        # A writer may have deleted it, since there is a newer one: then rank 0 selects again.
        everyone = world.all_gather_bytes(b"failed" if failed else b"", f"reading a checkpoint for the {about}")
        if own is not None and not any(everyone):
            return SelectedCheckpoint(own.checkpoint, belongs_to(folder), said[1])
