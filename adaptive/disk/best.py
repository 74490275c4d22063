"""Which checkpoint is the best: by a value in a file of its own in each checkpoint's folder.

The value of a checkpoint is mostly known after the checkpoint is written, by an evaluation after its step. So it is
stored beside the checkpoint's arrays when it is logged, and read when old checkpoints are deleted.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Literal

KeepBest = tuple[str, Literal["min", "max"]]  # the name of a value, and whether the smallest or the largest is the best

_FILE = "values.json"
_REMEMBERED = 4096  # values, because a checkpoint of an earlier step may still be written


class CheckpointValues:
    """Stores the value of each checkpoint that this process writes.

    Values arrive in the thread that runs the program, checkpoints in the thread that writes them, in any order.

    Args:
      keep_best: which value; `None` for none.
    """

    def __init__(self, keep_best: KeepBest | None):
        self._name = keep_best and keep_best[0]
        self._lock = threading.Lock()
        self._values: dict[int, float] = {}  # of the last steps with a value
        self._newest: tuple[int, Path] | None = None  # step and folder
        self._stored = False  # whether it has a value

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Keep the value that was logged after a step, if it is among others, and store it if there is a checkpoint of
        this step.
        """
        if self._name is not None and self._name in values:
            with self._lock:
                self._values[step] = values[self._name]
                if len(self._values) > _REMEMBERED:
                    self._values.pop(next(iter(self._values)))
                if self._newest is not None and self._newest[0] == step:
                    self._store()

    def written(self, step: int, folder: Path) -> bool:
        """Begin to store values in a checkpoint that has been written. Returns whether the one before it has a value,
        where values are compared.
        """
        with self._lock:
            complete = self._name is None or self._newest is None or self._stored
            self._newest, self._stored = (step, folder), False
            self._store()
            return complete

    def _store(self) -> None:
        """Store the value of the newest checkpoint, if both are known."""
        if self._newest is None or self._newest[0] not in self._values:
            return
        self._stored, (step, folder) = True, self._newest
        new = folder / f"{_FILE}.new"
        try:
            new.write_text(json.dumps({self._name: self._values[step]}))
            new.replace(folder / _FILE)
        except OSError as error:
            logging.getLogger("adaptive").warning("%s of %s cannot be stored: %s", self._name, folder, error.strerror)


def best_of(folders: Iterable[Path], keep_best: KeepBest) -> Path | None:
    """Return the checkpoint with the best value, the first of equal ones; `None` if all have none, or NaN."""
    name, mode = keep_best
    valued = [(value, folder) for folder in folders if not math.isnan(value := _value(folder, name))]
    return (min if mode == "min" else max)(valued, key=itemgetter(0), default=(0, None))[1]


def _value(folder: Path, name: str) -> float:
    """Return a value of a checkpoint; NaN if it has none that can be read."""
    try:
        return float(json.loads((folder / _FILE).read_bytes())[name])
    except (OSError, ValueError, KeyError, TypeError):
        return math.nan
