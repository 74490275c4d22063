"""Which checkpoint of a directory is restored: rank 0 chooses, and all others read the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from adaptive.base.errors import CheckpointError
from adaptive.base.roster import said_by_first
from adaptive.base.world import World
from adaptive.disk.directory import belongs_to, run_of
from adaptive.disk.whole import DamagedError, check

from .checkpoints import Checkpoints, NoneThereError, found_at, load_found, path_of


class Chosen(NamedTuple):
    """A checkpoint, read; or none, where there is none and that is well.

    Attributes:
      directory: that it is in.
      notes: on newer ones that were passed over. Replicated.
      run_id: of the run that has begun to write to a directory which holds no checkpoint yet; "" if none has.
    """

    checkpoint: dict[str, Any] | None
    directory: Path
    notes: list[str]
    run_id: str = ""


def chosen(world: World, where: Any, missing_ok: bool, about: str) -> Chosen:
    """The checkpoint to restore, read. On every process; communicates.

    Args:
      where: a directory of checkpoints, or one of them.

    Raises:
      CheckpointError: there is none that is whole, or this process does not see the one that rank 0 has chosen.
    """
    path = where.path if isinstance(where, Checkpoints) else path_of(where)
    before, failed = b"", None
    while True:
        own = b""

        def choose() -> bytes:
            nonlocal own
            own = json.dumps(_choice(path, missing_ok)).encode()
            return own

        said = said_by_first(world, choose, f"choosing the checkpoint for the {about}")
        choice = json.loads(said)
        if isinstance(choice, str):
            return Chosen(None, path, [], choice)
        if failed is not None and said == before:  # rank 0 still sees what this process does not
            raise failed
        name, seal, notes = choice
        found = path / name
        checkpoint, failed = _read(found, seal, world.rank, chosen_here=said == own)
        everyone = world.all_gather_bytes(
            b"" if failed is None else b"deleted", f"reading a checkpoint for the {about}"
        )
        if not any(everyone):
            assert checkpoint is not None
            return Chosen(checkpoint, belongs_to(found), notes)
        before = said  # a writer has deleted it meanwhile: there is a newer one


def _read(
    found: Path, seal: str, rank: int, *, chosen_here: bool
) -> tuple[dict[str, Any] | None, CheckpointError | None]:
    """Return the checkpoint, or an error to be raised if it was not deleted by a writer.

    Args:
      chosen_here: whether this process has chosen it, and so looked at it.
    """
    try:
        if not chosen_here:  # another process has chosen; it may be lost since, so ranks do not tell which one that was
            _check_same(found, seal, rank)
        return load_found(found), None
    except CheckpointError as error:
        if found.is_dir():
            raise
        return None, error


def _choice(path: Path, missing_ok: bool) -> tuple[str, str, tuple[str, ...]] | str:
    """Return rank 0's, with a name relative to the path that each was given; where there is none, the run's id."""
    try:
        found = found_at(path)
    except NoneThereError:
        if missing_ok:
            return run_of(path)
        raise
    return found.path.relative_to(path).as_posix(), found.seal, found.notes


def _check_same(found: Path, seal: str, rank: int) -> None:
    """Raises where this process sees another checkpoint, or none."""
    try:
        same = check(found) == seal
    except DamagedError as error:
        same, why = False, str(error)
    else:
        why = "it holds another one of that name"
    if not same:
        raise CheckpointError(
            f"rank {rank} cannot read {found}, which rank 0 has chosen: {why}. All ranks read the same checkpoint: "
            "keep it in a directory that all hosts see."
        )
