"""Selection of the checkpoint to restore: rank 0 selects, and all other ranks read the same one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from adaptive.base.errors import CheckpointError
from adaptive.base.roster import broadcast_bytes
from adaptive.base.world import World
from adaptive.disk.directory import belongs_to, run_of
from adaptive.disk.manifest import DamagedError, verify

from .checkpoints import Checkpoints, NoneThereError, found_at, load_found, path_of


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
      CheckpointError: no checkpoint is complete; or this process cannot read the one that rank 0 selected.
    """
    path = where.path if isinstance(where, Checkpoints) else path_of(where)
    before, failed = b"", None
    while True:
        own = b""

        def select() -> bytes:
            nonlocal own
            own = json.dumps(_selection(path, missing_ok)).encode()
            return own

        said = broadcast_bytes(world, select, f"choosing the checkpoint for the {about}")
        selection = json.loads(said)
        if isinstance(selection, str):
            return SelectedCheckpoint(None, path, [], selection)
        if failed is not None and said == before:  # rank 0 selects it again, but this process cannot read it
            raise failed
        name, seal, notes = selection
        found = path / name
        checkpoint, failed = _read(found, seal, world.rank, selected_here=said == own)
        everyone = world.all_gather_bytes(
            b"" if failed is None else b"deleted", f"reading a checkpoint for the {about}"
        )
        if not any(everyone):
            assert checkpoint is not None
            return SelectedCheckpoint(checkpoint, belongs_to(found), notes)
        before = said  # a writer has deleted it, so there is a newer one


def _read(
    found: Path, seal: str, rank: int, *, selected_here: bool
) -> tuple[dict[str, Any] | None, CheckpointError | None]:
    """Return the checkpoint; or the error to raise if no writer has deleted the checkpoint meanwhile.

    Args:
      selected_here: whether this process selected it, and so has verified it.
    """
    try:
        if not selected_here:  # the rank that selected it may have been lost, so ranks cannot tell
            _check_same(found, seal, rank)
        return load_found(found), None
    except CheckpointError as error:
        if found.is_dir():
            raise
        return None, error


def _selection(path: Path, missing_ok: bool) -> tuple[str, str, tuple[str, ...]] | str:
    """Return rank 0's selection, as (name relative to the path, seal, notes); without a checkpoint, the run's id."""
    try:
        found = found_at(path)
    except NoneThereError:
        if missing_ok:
            return run_of(path)
        raise
    return found.path.relative_to(path).as_posix(), found.seal, found.notes


def _check_same(found: Path, seal: str, rank: int) -> None:
    """Check that this process sees the same checkpoint as rank 0. Raises a CheckpointError if not."""
    try:
        same = verify(found) == seal
    except DamagedError as error:
        same, why = False, str(error)
    else:
        why = "this rank sees another checkpoint of that name"
    if not same:
        raise CheckpointError(
            f"rank {rank} cannot read {found}, which rank 0 selected: {why}. All ranks read the same checkpoint: "
            "keep it in a directory that all hosts see."
        )
