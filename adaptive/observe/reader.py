"""Read a record: the run's lines, each step once, and the same as columns.

A record is a text file of JSON objects, one per line, that only grows (`record.py` writes it). NaN is `null`,
infinities are the texts "inf" and "-inf". Every line can be read without the others:

    {"kind": "header", "version": 5, "run_id": "4f…", "workers": 4, "hooks": [{"name": "0/balance", "every": 10,
     "leaves": ["seconds"]}], "breakdown": ["input", …], "lower": […], "upper": […], …}
    {"kind": "step", "run_id": "4f…", "step": 1, "epoch": 0.01, "batch_sizes": [16, 16, 16, 16], …}

A header is written whenever a process opens the file, and holds for the steps of this run after it. A step that was
repeated after a restore has several lines; the first line after a restore has `"restored": true`. A line of step k
replaces all earlier lines of its run from step k on. A line without its end, of a process that was killed or of a full
disk, is skipped.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from adaptive.base.activity import WorkerSeconds
from adaptive.base.errors import RecordError

VERSION = 5
_LAST_OTHER = "aece1f2f"  # the last commit that reads versions 2 to 4
_LINE = b'{"kind": "'
_STEP = re.compile(rb'\{"kind": "step", "run_id": "([^"]*)", "step": (\d+)(, "restored": true)?, ')
_OBJECTS = ("decision", "members", "joined", "lost", "notes", "asked", "script", "between", "origin", "why")
_DTYPES: dict[str, type] = dict.fromkeys(
    ("step", "global_batch", "workers", "restores", "repeated", "batch_size/"), np.int64
)
_DTYPES["skipped"] = np.bool_
_BLOCK = 64  # rows that are collected in lists before they become arrays, while they are in the cache

_log = logging.getLogger("adaptive")


class RecordedRun(NamedTuple):
    """One run of a record.

    Attributes:
      header: the fields of its last header; `workers` is the largest number of worker slots in any of its headers.
      steps: an iterator over `(line number in the file, fields of the step)`, which reads lines lazily, and once.
    """

    header: dict[str, Any]
    steps: Iterator[tuple[int, dict[str, Any]]]


@dataclass
class _Place:
    """Where the line of a step is, and the restores between this step and the one before it.

    Attributes:
      offset, number: of the line in the file.
      restores, repeated: the number of these restores, and of the steps that they discarded.
      discarded: whether the program was restored to an earlier step afterwards.
    """

    offset: int
    number: int
    step: int
    restores: int
    repeated: int = 0
    discarded: bool = False


class _RunIndex:
    """The places of one run's lines, in the order of the file."""

    def __init__(self) -> None:
        self.headers: list[dict[str, Any]] = []
        self.executed: list[_Place] = []  # with discarded steps
        self.last: list[_Place] = []  # of each step its last line

    def add(self, place: _Place) -> None:
        """Add a line; it replaces the lines from its step on."""
        replaced: list[_Place] = []
        while self.last and self.last[-1].step >= place.step:
            replaced.append(self.last.pop())
        if place.restores:
            place.repeated = len(replaced)
            for other in replaced:
                other.discarded = True
        elif replaced:  # another process has written the same steps
            del self.executed[len(self.executed) - len(replaced) :]
        place.restores += sum(other.restores for other in replaced)
        place.repeated += sum(other.repeated for other in replaced)
        self.last.append(place)
        self.executed.append(place)


def read_run(path: str | os.PathLike[str], run: int = -1, *, discarded: bool = False) -> RecordedRun:
    """Read the lines of one run of a record.

    Each step comes once, as it was taken last. Its fields are those of its line (see this module), and for the first
    step after a restore `restores`, the number of restores, and `repeated`, the number of steps that they discarded. If
    a run was restarted with more workers, its earlier steps have zeros for them.

    Args:
      path: the file that `Program.run(record=…)` writes.
      run: index of the run, if the file holds several; by default the one that was written last.
      discarded: whether steps that a restore has discarded come too, in the order in which they were taken, with the
        field `discarded`.

    Raises:
      RecordError: the file is not a record, has another version, or has no such run.
      OSError: the file cannot be read.
    """
    runs = list(_index(path).values())
    if not -len(runs) <= run < len(runs):
        there = f"holds {len(runs)} run{'s' * (len(runs) != 1)}"
        raise RecordError(f"{path}: {there}; there is no run {run}." if runs else f"{path}: {there}.")
    found = runs[run]
    if not found.headers:
        raise RecordError(f"{path}: the header of this run is missing.")
    header = {**found.headers[-1], "workers": max(header.get("workers", 0) for header in found.headers)}
    return RecordedRun(header, _lines(path, found.executed if discarded else found.last, header["workers"]))


def _index(path: str | os.PathLike[str]) -> dict[str, _RunIndex]:
    """Return the runs of a file by their ids; the one that was written last comes last."""
    runs: dict[str, _RunIndex] = {}
    with open(path, "rb") as file:
        offset = 0
        for number, line in enumerate(file, 1):
            if (match := _STEP.match(line)) is not None:
                place = _Place(offset, number, int(match[2]), match[3] is not None)
                runs.setdefault(match[1].decode(), _RunIndex()).add(place)
            elif (header := _header(path, number, line)) is not None:
                found = runs.pop(header["run_id"], None) or _RunIndex()
                found.headers.append(header)
                runs[header["run_id"]] = found
            offset += len(line)
    return runs


def _header(path: str | os.PathLike[str], number: int, line: bytes) -> dict[str, Any] | None:
    """Return the fields of a header; `None` for a line that was cut.

    Raises:
      RecordError: the line is not of a record, or of another version.
    """
    if not line.strip():
        return None
    if not line.startswith(_LINE[: len(line.strip())]):
        raise RecordError(f"{path}:{number}: not a line of a record. Is this a recorded run?")
    try:
        header = json.loads(line)
    except ValueError:
        _cut(path, number)
        return None
    if not isinstance(header, dict) or header.get("kind") != "header":
        raise RecordError(f"{path}:{number}: not a valid line of a record. Is this a recorded run?")
    if header.get("version") != VERSION:
        raise RecordError(
            f"{path}:{number}: a record of version {header.get('version')}; this reads version {VERSION}. Commit "
            f"{_LAST_OTHER} is the last one that reads versions 2 to 4."
        )
    return header


def _cut(path: str | os.PathLike[str], number: int) -> None:
    _log.warning("%s:%d: this line is truncated. It is skipped.", path, number)


def _lines(
    path: str | os.PathLike[str], places: Sequence[_Place], workers: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    loads = _fastest_loads()
    with open(path, "rb") as file:
        for place in places:
            file.seek(place.offset)
            try:
                fields = loads(file.readline())
            except ValueError:
                _cut(path, place.number)
                continue
            if place.restores:
                fields |= {"restores": place.restores, "repeated": place.repeated}
            if place.discarded:
                fields["discarded"] = True
            if len(fields.get("batch_sizes") or ()) < workers:
                _pad(fields, workers)
            yield place.number, fields


def _fastest_loads() -> Callable[[bytes], Any]:
    """Return orjson's parser if installed, which reads 400 MB in a second, Python's own in six."""
    try:
        from orjson import loads
    except ImportError:
        return json.loads
    return loads


def _pad(fields: dict[str, Any], workers: int) -> None:
    """Add zeros for further worker slots to the lists of a step."""
    seconds = fields.get("workers") or {}
    of_workers = fields.get("batch_sizes"), fields.get("previous_batch_sizes"), *seconds.values()
    for numbers in of_workers:
        if numbers is not None:
            numbers += [0] * (workers - len(numbers))


class Record(dict[str, np.ndarray]):
    """The columns of one recorded run by name: a dict, so `pandas.DataFrame(record)` is its table.

    Attributes:
      header: the fields of the run's header: `workers`, `hooks`, `seed`, …
    """

    def __init__(self, header: dict[str, Any], columns: dict[str, np.ndarray]):
        super().__init__(columns)
        self.header = header

    def of_workers(self, name: str) -> np.ndarray:
        """Return the columns `name/0`, `name/1`, … as one array; shape=(steps, workers)."""
        return np.stack([self[f"{name}/{slot}"] for slot in range(self.header["workers"])], 1)


def read(path: str | os.PathLike[str], run: int = -1) -> Record:
    """Read a record as columns with a row for each step, taken as it was last.

        steps = pandas.DataFrame(ad.log.read("run.jsonl"))
        steps.plot("step", "loss")

    The columns have the names of `ad.log.scalars`, and some more. NaN stands for what is unknown.

    * `step`, `epoch`, `seconds` (of the step, on the process that recorded it), `at` (when the step ended, in seconds
      since 1970), `global_batch`, `workers`, `message_bytes`, `skipped`.
    * `restores` and `repeated`: the number of restores between this step and the one before it, and of the steps that
      they discarded.
    * the driver's metrics that are numbers, by their names, and `hyperparameter/lr` and so on.
    * `seconds/input`, `seconds/computing`, …: `seconds` by cause, on the process that recorded it.
    * for each worker slot `batch_size/0`, …, and the seconds `input/0`, `computing/0`, `busy/0` and `waiting/0`, …, of
      this step. `waiting` is the time in which the worker waited for others, in all messages of the step; it is the one
      to use for shares of waiting. Zeros for an empty slot.
    * the values of hooks: `hook/0/adapt_batch_size/noise.scale`; lists, if they are arrays.
    * objects, `None` in most rows: `decision`, `members`, `joined`, `lost`, `notes`, `asked` (the targets before the
      hooks ran), `script` (requests of the script), `between` (seconds since the step before by activity), `origin`
      (of the process, in its first step), `why` (by hook: why it asked for nothing, where that has changed).

    Args:
      path: the file that `Program.run(record=…)` writes.
      run: index of the run, if the file holds several; by default the one that was written last.

    Raises:
      RecordError: the file is not a record, has another version, or has no such run; or the run has no steps.
      OSError: the file cannot be read.
    """
    header, steps = read_run(path, run)
    rows: list[dict[str, Any]] = []
    blocks: list[dict[str, np.ndarray]] = []  # long lists of rows are slow
    try:
        for number, fields in steps:
            try:
                rows.append(_row(header, fields))
            except (KeyError, TypeError, AttributeError) as error:
                raise RecordError(f"{path}:{number}: a step without {error}.") from error
            if len(rows) == _BLOCK:
                blocks.append(_block(rows))
                rows = []
        blocks += [_block(rows)] if rows else []
        if blocks:
            return Record(header, _columns(blocks))
    except ValueError as error:
        raise RecordError(f"{path}: its steps are inconsistent: {error}.") from error
    raise RecordError(f"{path}: the run has no steps. Was it stopped before its first one was done?")


def _row(header: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of one step. A name with "/" at its end is a list with a number for each worker slot."""
    sizes = fields["batch_sizes"]
    row = dict(fields["metrics"])
    row |= {name: fields[name] for name in ("step", "epoch", "seconds", "message_bytes", "skipped")}
    row |= {"at": fields.get("at"), "global_batch": sum(sizes), "workers": len(fields["members"])}
    row |= {"restores": fields.get("restores", 0), "repeated": fields.get("repeated", 0)}
    row |= {f"seconds/{name}": s for name, s in zip(header["breakdown"], fields["breakdown"], strict=True)}
    row |= {f"hyperparameter/{name}": value for name, value in fields["hyperparameters"].items()}
    row["batch_size/"] = sizes
    row |= {f"{name}/": fields["workers"][name] for name in WorkerSeconds._fields}
    for hook in header["hooks"]:
        values = fields["hooks"].get(hook["name"])  # none in a step that was skipped
        row |= {f"hook/{hook['name']}/{leaf}": value for leaf, value in zip(hook["leaves"], values or (), strict=False)}
    return row | {name: fields.get(name) or None for name in _OBJECTS}


def _block(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return the columns of some rows; values that a row lacks are unknown."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _array(name, [row.get(name) for row in rows]) for name in names}


def _columns(blocks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the columns of all rows, with one for each worker slot in place of an array of all."""
    found: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(name for block in blocks for name in block):
        parts = [block[name] if name in block else _array(name, [None] * len(block["step"])) for block in blocks]
        column = np.concatenate(parts)
        if name.endswith("/"):
            found |= {f"{name}{slot}": column[:, slot] for slot in range(column.shape[1])}
        else:
            found[name] = column
    return found


def _array(name: str, rows: list[Any]) -> np.ndarray:
    if name in _DTYPES or name.endswith("/"):
        return np.array(rows, _DTYPES.get(name, np.float32))
    if name not in _OBJECTS:
        try:
            numbers = np.array(rows, np.float64)  # None becomes NaN, "inf" infinity
            if numbers.ndim == 1:
                return numbers
        except (ValueError, TypeError):
            pass  # lists, in some rows or all
    objects = np.empty(len(rows), object)
    for place, value in enumerate(rows):
        objects[place] = value
    return objects
