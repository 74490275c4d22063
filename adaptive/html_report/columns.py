"""A recorded run as arrays with a row per step. A long run of many workers has millions of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from adaptive.base.errors import RecordError
from adaptive.observe.reader import read_run

_BLOCK = 256  # rows collected in lists before they become an array; larger lists are slower (caches, collector)
_OF_NOISE = ("scale", "lower", "upper")  # a value with leaves of these names is a noise scale


class Notice(NamedTuple):
    """The decision, joins, losses and notes of one step that has any."""

    row: int
    decision: dict[str, Any] | None
    joined: tuple[int, ...]
    lost: tuple[str, ...]
    notes: tuple[str, ...]
    asked: dict[str, Any] | None  # the targets before this step


class Restored(NamedTuple):
    """Restores from checkpoints between two steps of the run.

    Attributes:
      row: the row of the first step after them.
      after: the step that was restored.
      restores: their number.
      repeated: recorded steps that were discarded then, and taken again.
    """

    row: int
    after: int
    restores: int
    repeated: int


@dataclass(frozen=True)
class Columns:
    """One recorded run of T steps and n workers.

    Attributes:
      header: the header of the record; the last one of a run with several.
      step: numbers of the steps; shape=(T,).
      epoch: epochs of data consumed after each step; shape=(T,).
      seconds: duration of each step on the process that recorded it; shape=(T,).
      skipped: whether the step was skipped; shape=(T,).
      changes: rows where batch sizes change, the first row included; shape=(c,).
      changed: batch sizes from those rows on; shape=(c, n).
      members: pairs of a row where the members change, and the members from that row on.
      parts: names of the breakdown.
      breakdown: seconds by part, of the process that recorded them; shape=(T, parts). `None` in an older record.
      workers: seconds of "input", "computing" and "busy" of each worker; shape=(T, n). NaN for an empty slot, in a
        worker's first step, and in the first step of the run or after a restore, since preparation is included in
        these. Empty in an older record.
      metrics: metrics by name; shape=(T,).
      noise: the noise scales that hooks received, with their bounds, by name; shape=(T, 3).
      notices: the steps with a decision, a join, a loss or a note.
      unknown: by hook, whether all numbers that it received were NaN; shape=(T,). Hooks without values are left out.
      restored: the restores of the run, oldest first. A repeated step has one row, of its last repetition.
      origins: the processes that recorded, oldest first: see `adaptive.observe.origin`. Empty in an older record.
    """

    header: dict[str, Any]
    step: np.ndarray
    epoch: np.ndarray
    seconds: np.ndarray
    skipped: np.ndarray
    changes: np.ndarray
    changed: np.ndarray
    members: tuple[tuple[int, tuple[int, ...]], ...]
    parts: tuple[str, ...]
    breakdown: np.ndarray | None
    workers: dict[str, np.ndarray]
    metrics: dict[str, np.ndarray]
    noise: dict[str, np.ndarray]
    notices: tuple[Notice, ...]
    unknown: dict[str, np.ndarray]
    restored: tuple[Restored, ...] = ()
    origins: tuple[dict[str, Any], ...] = ()

    def __len__(self) -> int:
        return len(self.step)

    @property
    def n(self) -> int:
        """The number of worker slots."""
        return int(self.changed.shape[1])

    @cached_property
    def sizes(self) -> np.ndarray:
        """Batch size of each worker; shape=(T, n)."""
        lengths = np.diff(np.append(self.changes, len(self)))
        return np.repeat(self.changed, lengths, axis=0)

    @cached_property
    def global_batch(self) -> np.ndarray:
        """Global batch size; shape=(T,)."""
        return np.repeat(self.changed.sum(1), np.diff(np.append(self.changes, len(self))))

    @cached_property
    def elapsed(self) -> np.ndarray:
        """Total seconds in steps of this run, up to the end of each step; shape=(T,)."""
        return np.cumsum(self.seconds)

    @cached_property
    def examples(self) -> np.ndarray:
        """Total number of examples of this run, up to the end of each step; shape=(T,)."""
        return np.cumsum(self.global_batch)


def read_columns(path: str | Path, run: int = -1) -> Columns:
    """Read one run of a record.

    Raises:
      RecordError: the file is not a record, or has no such run, or the run has no steps.
      OSError: the file cannot be read.
    """
    header, steps = read_run(path, run)
    try:
        rows = _Rows(header, header["workers"])
    except (KeyError, TypeError) as error:
        raise RecordError(f"{path}: the run's header has no {error}.") from error
    for number, fields in steps:
        try:
            rows.add(fields)
        except KeyError as error:
            raise RecordError(f"{path}:{number}: a step without {error}.") from error
        except (IndexError, TypeError, ValueError) as error:
            raise RecordError(f"{path}:{number}: not a valid step: {error}.") from error
    if not rows.count:
        raise RecordError(f"{path}: the run has no steps. Was it stopped before its first one was done?")
    try:
        return rows.columns()
    except (IndexError, TypeError, ValueError) as error:
        raise RecordError(f"{path}: its steps are inconsistent: {error}.") from error


class _Column:
    """A growing array of rows, read from JSON: `None` becomes NaN, "inf" infinity."""

    def __init__(self, dtype: type, width: int | None = None):
        self._dtype, self._width = dtype, width
        self._waiting: list[Any] = []
        self._blocks: list[np.ndarray] = []
        self.append = self._waiting.append

    def settle(self) -> None:
        """Convert the waiting rows into an array."""
        if self._waiting:
            block: np.ndarray = np.array(self._waiting, self._dtype)
            if self._width is not None and block.shape[1:] != (self._width,):
                raise ValueError(f"{self._width} numbers a step are expected, and there are {block.shape[1:]}")
            self._blocks.append(block)
            self._waiting.clear()

    def array(self) -> np.ndarray:
        self.settle()
        return np.concatenate(self._blocks)


class _Rows:
    """The steps of a record, collected as columns."""

    def __init__(self, header: dict[str, Any], n: int):
        self.count, self._header, self.workers = 0, header, n
        self._parts = tuple(header.get("breakdown", ()))
        self._scalars = {name: _Column(np.float64) for name in ("step", "epoch", "seconds")}
        self._skipped: list[int] = []
        self._breakdown = _Column(np.float32, len(self._parts)) if self._parts else None
        self._workers = {name: _Column(np.float32, n) for name in ("input", "computing", "busy") if self._parts}
        self._metrics: dict[str, _Column] = {}
        self._names: list[str] = []
        self._noise = _noise_leaves(header["hooks"])
        self._scales = {name: _Column(np.float64, 3) for name in self._noise}
        self._sizes: list[tuple[int, list[int]]] = []
        self._members: list[tuple[int, tuple[int, ...]]] = []
        self._notices: list[Notice] = []
        self._unknown: dict[str, list[int]] = {hook["name"]: [] for hook in header["hooks"] if hook["leaves"]}
        self._asked: dict[str, Any] | None = None  # of the last step
        self._restored: list[Restored] = []
        self._origins: list[dict[str, Any]] = []
        self._last_sizes: Any = None
        self._last_members: Any = None

    def add(self, fields: dict[str, Any]) -> None:
        row = self.count
        for name, column in self._scalars.items():
            column.append(fields[name])
        if self._breakdown is not None:
            self._breakdown.append(fields["breakdown"])
            workers = fields["workers"]
            for name, column in self._workers.items():
                column.append(workers[name])
        if (sizes := fields["batch_sizes"]) != self._last_sizes:
            self._sizes.append((row, sizes))
            self._last_sizes = sizes
        if (members := fields.get("members")) is not None and members != self._last_members:
            self._members.append((row, tuple(members)))
            self._last_members = members
        self._add_metrics(fields.get("metrics") or {})
        for name, (hook, places) in self._noise.items():
            leaves = fields["hooks"].get(hook)
            self._scales[name].append([leaves[place] for place in places] if leaves else [None] * 3)
        for hook, unknown in self._unknown.items():
            if (values := fields["hooks"].get(hook)) and not _any_known(values):
                unknown.append(row)
        if fields.get("restores"):
            self._restored.append(Restored(row, fields["step"] - 1, fields["restores"], fields["repeated"]))
        if (origin := fields.get("origin")) is not None:
            self._origins.append(origin)
        self._add_notice(row, fields)
        self.count += 1
        if self.count % _BLOCK == 0:
            self._settle()

    def _add_metrics(self, metrics: dict[str, Any]) -> None:
        if self._names != list(metrics):
            for name in metrics:
                if name not in self._metrics:
                    self._metrics[name] = _Column(np.float64)
                    for _ in range(self.count):
                        self._metrics[name].append(None)
            self._names = list(metrics)
        for name, column in self._metrics.items():
            column.append(metrics.get(name))

    def _add_notice(self, row: int, fields: dict[str, Any]) -> None:
        if fields.get("skipped"):
            self._skipped.append(row)
        for request in fields.get("script", ()):  # made after the step before
            decision = {**request, "by": [request["script"]]}
            self._notices.append(Notice(max(row - 1, 0), decision, (), (), (), self._asked))
        self._asked = fields.get("asked")
        decision, notes = fields["decision"], fields.get("notes")
        joined, lost = fields.get("joined"), fields.get("lost")
        if decision or notes or joined or lost:
            lists = tuple(joined or ()), tuple(lost or ()), tuple(notes or ())
            self._notices.append(Notice(row, decision, *lists, fields.get("asked")))

    def _settle(self) -> None:
        breakdown = [self._breakdown] if self._breakdown is not None else []
        for columns in (self._scalars, self._workers, self._metrics, self._scales):
            for column in columns.values():
                column.settle()
        for column in breakdown:
            column.settle()

    def columns(self) -> Columns:
        scalars = {name: column.array() for name, column in self._scalars.items()}
        skipped = _mask(self._skipped, self.count)
        changes = np.array([row for row, _ in self._sizes])
        changed = np.array([sizes for _, sizes in self._sizes], np.int64)
        if changed.ndim != 2 or changed.shape[1] != self.workers:
            raise ValueError("their batch sizes are for another number of workers than the header's")
        workers = {name: column.array() for name, column in self._workers.items()}
        if workers:
            absent = workers["busy"] <= 0
            absent[[0, *(restored.row for restored in self._restored)]] = True
            for notice in self._notices:
                absent[notice.row, list(notice.joined)] = True
            workers = {name: np.where(absent, np.float32(np.nan), column) for name, column in workers.items()}
        return Columns(
            self._header,
            scalars["step"].astype(np.int64),
            scalars["epoch"],
            np.nan_to_num(scalars["seconds"]),
            skipped,
            changes,
            changed,
            tuple(self._members),
            self._parts,
            None if self._breakdown is None else self._breakdown.array(),
            workers,
            {name: column.array() for name, column in self._metrics.items()},
            {name: column.array() for name, column in self._scales.items()},
            tuple(self._notices),
            {name.partition("/")[2] or name: _mask(rows, self.count) for name, rows in self._unknown.items()},
            tuple(self._restored),
            tuple(self._origins),
        )


def _mask(rows: Sequence[int], count: int) -> np.ndarray:
    mask = np.zeros(count, bool)
    mask[list(rows)] = True
    return mask


def _any_known(value: Any) -> bool:
    """Return whether nested lists have a number other than `None`, which is how a record writes NaN."""
    return any(map(_any_known, value)) if isinstance(value, list) else value is not None


def _noise_leaves(hooks: Sequence[dict[str, Any]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return each noise scale by name: its hook, and the indices of scale and bounds among the hook's leaves."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for hook in hooks:
        places = {leaf: place for place, leaf in enumerate(hook["leaves"])}
        for leaf in places:
            root = leaf.rpartition(".")[0]
            wanted = [f"{root}.{field}" if root else field for field in _OF_NOISE]
            if root not in found and all(name in places for name in wanted):
                found[root] = hook["name"], tuple(places[name] for name in wanted)
    return {root or "noise scale": where for root, where in found.items()}
