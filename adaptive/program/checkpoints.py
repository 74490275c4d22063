"""`Checkpoints`: where, how often, and how many checkpoints of a run are kept on disk."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from adaptive.base.errors import CheckpointError
from adaptive.base.values.numbers import whole
from adaptive.disk import folders
from adaptive.disk.best import KeepBest, best_of

_EVERY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(step|epoch|minute)s?\s*")
_TAKES = '"100 steps", "1 epoch", "0.5 epochs", "10 minutes", or a whole number of steps'


class Every(NamedTuple):
    """An interval: a number of steps, epochs or minutes."""

    number: Fraction
    unit: str

    def due(self, step: int, before: int, consumed: int, examples: int | None) -> bool:
        """Return whether an interval of steps or epochs ends with a step, after which `consumed` examples were taken,
        and `before` it `before`. `examples`: in an epoch; `None` if unknown. Replicated.
        """
        if self.unit == "step":
            return step % int(self.number) == 0
        if self.unit != "epoch" or examples is None:
            return False
        stretch = self.number * examples
        return before // stretch < consumed // stretch


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints of a run on disk, for `program.run(checkpoint=…)` and `program.restore(…)`.

    The process with `world.rank == 0` writes them in the background; no step waits for the disk. A checkpoint that is
    due while the previous one is still being written is skipped, with a note. If one cannot be written (a full disk),
    that process's report has a note, and the run continues. `run` returns after the last state is written.

    Args:
      directory: created if missing. To restore on several hosts, it must be visible on all of them. It belongs to one
        run, and to the runs that continue it.
      every: the interval: "100 steps", "1 epoch", "0.5 epochs", "10 minutes", or an integer number of steps. Minutes
        are measured by rank 0, which announces a due checkpoint in a step's last message.
      keep: number of checkpoints on disk to keep; older ones are deleted.
      keep_best: a further checkpoint to keep: the one with the best value so far, also after restarts. The name of a
        value, and whether the best is the smallest or the largest: `("val.loss", "min")`. The value of a checkpoint is
        what was logged for its step before the next one, by `program.evaluate(…, log="val")` or `program.log`, or a
        number among the driver's metrics. Checkpoints without a value, or with NaN, are not compared.

    Raises:
      CheckpointError: an argument is invalid.

    Example:
      >>> ad.Checkpoints("run/", every="0.5 epochs", keep=2).keep
      2
    """

    directory: str | os.PathLike[str]
    every: str | int = "1 epoch"
    keep: int = 3
    keep_best: KeepBest | None = None

    def __post_init__(self) -> None:
        self.interval, self.path  # noqa: B018  # raise
        keep = whole(self.keep)
        if keep is None or keep < 1:
            raise CheckpointError(
                f"keep={self.keep!r}: must be a whole number of checkpoints, at least 1. For a run without "
                "checkpoints:  program.run(…) without checkpoint="
            )
        match self.keep_best:
            case None | (str(), "min" | "max"):
                pass
            case _:
                raise CheckpointError(
                    f"keep_best={self.keep_best!r}: must be the name of a logged value or of a metric, and which is "
                    'the best:  keep_best=("val.loss", "min")'
                )

    @property
    def interval(self) -> Every:
        """The interval, as a number and its unit. Raises a CheckpointError if `every` is none."""
        steps = whole(self.every)
        match = _EVERY.fullmatch(self.every) if isinstance(self.every, str) else None
        every = Every(Fraction(match[1]), match[2]) if match else Every(Fraction(steps or 0), "step")
        if every.number <= 0 or (every.unit == "step" and every.number.denominator > 1):
            raise CheckpointError(f"every={self.every!r} is not an interval of checkpoints. Write {_TAKES}.")
        return every

    @property
    def path(self) -> Path:
        """The directory, as an absolute path without symbolic links."""
        return Path(os.path.realpath(os.path.expanduser(self.directory)))

    def read(self) -> dict[str, Any]:
        """Return the newest readable checkpoint, as `program.checkpoint()` returns it.

        Containers become dicts: leaves keep their names, and arrays their dtypes. Only this process reads. Unreadable
        checkpoints are skipped without a note.

        Raises:
          CheckpointError: there is no readable checkpoint.
        """
        return newest_readable(self.path).checkpoint

    def best(self) -> Path:
        """Return the path of the checkpoint with the best value, by `keep_best`: `program.restore(checkpoints.best())`.

        Only this process reads. Of equal values, the first.

        Raises:
          CheckpointError: there is no `keep_best`, or no checkpoint has a value of this name.
        """
        if self.keep_best is None:
            raise CheckpointError('best() needs  ad.Checkpoints(…, keep_best=("val.loss", "min"))')
        try:
            found = best_of(reversed(folders.checkpoints(self.path)), self.keep_best)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}.") from error
        if found is None:
            name = self.keep_best[0]
            raise CheckpointError(
                f"no checkpoint in {self.path} has a value {name!r}. It is logged after the step of a checkpoint:  "
                f'program.evaluate(…, log="val")  or  program.log({name.partition(".")[0]}=…)'
            )
        return found


class FoundCheckpoint(NamedTuple):
    """A checkpoint that was read."""

    folder: Path
    checkpoint: dict[str, Any]
    notes: list[str]  # one line for each newer checkpoint that cannot be read


class NoneThereError(CheckpointError):
    """There is no checkpoint, not even an unreadable one."""


def newest_readable(path: Path) -> FoundCheckpoint:
    """Return the newest checkpoint of a directory that can be read, or the checkpoint at `path` itself.

    A writer may delete checkpoints meanwhile, since it has finished newer ones: then these are read.

    Raises:
      CheckpointError: there is none (a `NoneThereError`), or none can be read.
    """
    notes: list[str] = []
    try:
        there = folders.checkpoints(path)
        for folder in there:
            try:
                return FoundCheckpoint(folder, folders.read(folder), notes)
            except CheckpointError as error:
                if folders.checkpoints(path) != there:
                    return newest_readable(path)
                notes.append(f"the checkpoint {folder.name} is skipped: {error}")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    if notes:
        raise CheckpointError(f"no checkpoint in {path} can be read:\n" + "\n".join(notes))
    what = "holds no checkpoint" if path.is_dir() else "is not a directory" if path.exists() else "does not exist"
    raise NoneThereError(
        f"there is nothing to restore: {path} {what}. To start without a checkpoint:  "
        "program.restore(…, missing_ok=True)"
    )
