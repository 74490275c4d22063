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
    """The checkpoint to restore, or none, where a directory holds none and that is allowed.

    Attributes:
      checkpoint: as read.
      directory: that holds it.
      notes: on newer checkpoints that were skipped. Replicated.
      run_id: of the run that writes to a directory without a checkpoint; "" if none does.
    """

    checkpoint: dict[str, Any] | None
    directory: Path
    notes: list[str]
    run_id: str = ""


def select_checkpoint(world: World, where: Any, missing_ok: bool, about: str) -> SelectedCheckpoint:
    """Select the checkpoint to restore, and read it. Communicates; all processes call it.

    Args:
      where: a directory of checkpoints, or one of them.
      missing_ok: whether the directory may hold no checkpoint.
      about: what it is for, in errors.

    Raises:
      CheckpointError: no checkpoint is complete; or this process does not see the one that rank 0 has selected.
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
        if failed is not None and said == before:  # rank 0 still sees what this process does not
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
        before = said  # a writer has deleted it meanwhile, so there is a newer one


def _read(
    found: Path, seal: str, rank: int, *, selected_here: bool
) -> tuple[dict[str, Any] | None, CheckpointError | None]:
    """Return the checkpoint; or the error to raise if no writer has deleted the checkpoint meanwhile.

    Args:
      selected_here: whether this process has selected it, and so verified it.
    """
    try:
        if not selected_here:  # ranks do not tell who has selected: that process may be lost since
            _check_same(found, seal, rank)
        return load_found(found), None
    except CheckpointError as error:
        if found.is_dir():
            raise
        return None, error


def _selection(path: Path, missing_ok: bool) -> tuple[str, str, tuple[str, ...]] | str:
    """Return rank 0's selection: a name relative to the given path, a seal, and notes; or, without one, a run's id."""
    try:
        found = found_at(path)
    except NoneThereError:
        if missing_ok:
            return run_of(path)
        raise
    return found.path.relative_to(path).as_posix(), found.seal, found.notes


def _check_same(found: Path, seal: str, rank: int) -> None:
    """Raise a CheckpointError if this process sees another checkpoint than rank 0, or none."""
    try:
        same = verify(found) == seal
    except DamagedError as error:
        same, why = False, str(error)
    else:
        why = "this rank sees another checkpoint of that name"
    if not same:
        raise CheckpointError(
            f"rank {rank} cannot read {found}, which rank 0 has selected: {why}. All ranks read the same checkpoint: "
            "keep it in a directory that all hosts see."
        )
