"""Read a record: the run's lines, each step once, and the same as columns.

A record is a text file of JSON objects, one per line, that only grows (`record.py` writes it). NaN is `null`,
infinities are the texts "inf" and "-inf". Every line can be read without the others:

    {"kind":"header","version":6,"run_id":"4f…","workers":4,"hooks":[{"name":"0/balance","every":10,
     "leaves":["seconds"]}],"breakdown":["input",…],"lower":[…],"upper":[…],…}
    {"kind":"step","run_id":"4f…","step":1,"epoch":0.01,"batch_sizes":[16,16,16,16],…}

A header is written whenever a process opens the file, and holds for the steps of this run after it. A step that was
repeated after a restore has several lines; the first line after a restore has `"restored":true`. A line of step k
replaces all earlier lines of its run from step k on. A line without its end, of a process that was killed or of a full
disk, is skipped. Fields that are empty, or as usual, are left out: see `_complete`.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from adaptive.base.errors import RecordError

VERSION = 6
_OTHERS = "Commit 967daad3 reads version 5, and aece1f2f versions 2 to 4."
_STEP = re.compile(rb'\{"kind":"step","run_id":"([^"]*)","step":(\d+)(,"restored":true)?,')
_OBJECTS = ("decision", "members", "joined", "lost", "notes", "asked", "script", "origin", "why")
_BLOCK = 64  # rows that become arrays together, while they are in the cache

_log = logging.getLogger("adaptive")


class RecordedRun(NamedTuple):
    """One run of a record.

    Attributes:
      header: the fields of its last header; `workers` is the largest number of worker slots in any of its headers.
      steps: an iterator over `(line number in the file, fields of the step)`, which reads lines lazily, and once.
    """

    header: dict[str, Any]
    steps: Iterator[tuple[int, dict[str, Any]]]


class _Lines(NamedTuple):
    """The lines of one run."""

    headers: list[dict[str, Any]]
    steps: list[tuple[int, int, int, bool]]  # number of the line, offset, step, and whether a restore came before it

    def executed(self) -> dict[str, np.ndarray]:
        """Return a row for each time that a step was taken: "number" and "offset" of its line; "discarded", whether a
        restore to an earlier step followed; else the "restores" since the row before, and steps "repeated" by them.
        """
        number, offset, step, restored = np.array(self.steps, np.int64).reshape(-1, 4).T
        taken = ~_replaced(step + (restored.cumsum() << 40))  # not written once more, after the same restores
        number, offset, step, restores = (column[taken] for column in (number, offset, step, restored.cumsum()))
        discarded = _replaced(step)
        counts = {"restores": restores, "repeated": discarded.cumsum()}
        found = {"number": number, "offset": offset, "discarded": discarded}
        for name, count in counts.items():
            found[name] = np.zeros_like(count)
            found[name][~discarded] = np.diff(count[~discarded], prepend=0)
        return found


def _replaced(values: np.ndarray) -> np.ndarray:
    """Return for each value whether an equal or smaller one follows."""
    return np.append(np.minimum.accumulate(values[::-1])[::-1][1:] <= values[:-1], np.zeros(len(values[:1]), bool))


def read_run(path: str | os.PathLike[str], run: int = -1, *, discarded: bool = False) -> RecordedRun:
    """Read the lines of one run of a record.

    Each step comes once, as it was taken last. Its fields are those of its line (see this module), completed; and
    `restores`, the number of restores before it, and `repeated`, the number of steps that they discarded. If a run was
    restarted with more workers, its earlier steps have zeros for them.

    Args:
      path: the file that `Program.run(record=…)` writes.
      run: index of the run, if the file holds several; by default the one that was written last.
      discarded: whether steps that a restore has discarded come too, in the order in which they were taken; the field
        `discarded` tells them.

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
    rows = found.executed()
    if not discarded:
        rows = {name: column[~rows["discarded"]] for name, column in rows.items()}
    return RecordedRun(header, _steps(path, rows, header["workers"]))


def _index(path: str | os.PathLike[str]) -> dict[str, _Lines]:
    """Return the lines of all runs of a file by the runs' ids; the one that was written last comes last."""
    runs: dict[str, _Lines] = {}
    with open(path, "rb") as file:
        offset = 0
        for number, text in enumerate(file, 1):
            if (match := _STEP.match(text)) is not None:
                line = number, offset, int(match[2]), match[3] is not None
                runs.setdefault(match[1].decode(errors="replace"), _Lines([], [])).steps.append(line)
            elif (header := _header(f"{path}:{number}", text)) is not None:
                found = runs.pop(header["run_id"], None) or _Lines([], [])
                found.headers.append(header)
                runs[header["run_id"]] = found
            offset += len(text)
    return runs


def _header(place: str, text: bytes) -> dict[str, Any] | None:
    """Return the fields of a header; `None` for a line that was cut. Raises a RecordError for another kind of line."""
    if not text.strip():
        return None
    try:
        header = json.loads(text)
    except ValueError:
        if text[:1] == b"{":
            _cut(place)
            return None
        header = None
    if not isinstance(header, dict) or header.get("kind") not in ("header", "step"):
        raise RecordError(f"{place}: not a line of a record. Is this a recorded run?")
    if header.get("version") != VERSION:
        raise RecordError(f"{place}: a record of version {header.get('version')}; this reads {VERSION}. {_OTHERS}")
    return header


def _cut(place: str) -> None:
    _log.warning("%s: this line is truncated. It is skipped.", place)


def _steps(
    path: str | os.PathLike[str], rows: dict[str, np.ndarray], workers: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    with open(path, "rb") as file:
        for row in zip(*(column.tolist() for column in rows.values()), strict=True):
            about = dict(zip(rows, row, strict=True))
            file.seek(about.pop("offset"))
            number = about.pop("number")
            try:
                fields = json.loads(file.readline()) | about
            except ValueError:
                _cut(f"{path}:{number}")
                continue
            try:
                _complete(fields, workers)
            except (KeyError, TypeError) as error:
                raise RecordError(f"{path}:{number}: a step without {error}.") from error
            yield number, fields


def _complete(fields: dict[str, Any], workers: int) -> None:
    """Add the fields that a line leaves out, and zeros for worker slots that came later."""
    sizes = fields["batch_sizes"]
    if "members" not in fields:
        fields["members"] = [*range(len(sizes))]
    if (asked := fields.get("asked")) and "active" not in asked:
        asked["active"] = fields["members"]
    if len(sizes) < workers:
        short = (sizes, fields.get("previous_batch_sizes", []), *fields["microseconds"].values())
        for numbers in (numbers for numbers in short if isinstance(numbers, list)):
            numbers += [0] * (workers - len(numbers))
    if "previous_batch_sizes" not in fields:
        fields["previous_batch_sizes"] = sizes
    for name, value in _USUAL.items():
        if name not in fields:
            fields[name] = value


_USUAL: dict[str, Any] = dict.fromkeys(("asked", "decision", "origin", "at")) | {
    **dict.fromkeys(("joined", "lost", "notes", "script"), ()),
    **{name: {} for name in ("hyperparameters", "logged", "between", "why")},
}


class Record(dict[str, np.ndarray]):
    """The columns of one recorded run by name: a dict, so `pandas.DataFrame(record)` is its table.

    Attributes:
      header: the fields of the run's header: `workers`, `hooks`, `seed`, …
      metrics: the names of the columns with the driver's metrics.
      logged: the names of those that `program.log` and `program.evaluate(log=…)` wrote.
    """

    def __init__(
        self, header: dict[str, Any], columns: dict[str, np.ndarray], metrics: Sequence[str], logged: Sequence[str]
    ):
        super().__init__(columns)
        self.header, self.metrics, self.logged = header, metrics, logged

    def of_workers(self, name: str) -> np.ndarray:
        """Return the columns `name/0`, `name/1`, … as one array; shape=(steps, workers)."""
        return np.stack([self[f"{name}/{slot}"] for slot in range(self.header["workers"])], axis=1)

    def named(self, prefix: str) -> dict[str, np.ndarray]:
        """Return the columns whose names begin with a prefix, by the rest of their names."""
        return {name.removeprefix(prefix): self[name] for name in self if name.startswith(prefix)}

    def where(self, rows: np.ndarray) -> Record:
        """Return the rows that a boolean array selects."""
        columns = {name: column[rows] for name, column in self.items()}
        return Record(self.header, columns, self.metrics, self.logged)


def read(path: str | os.PathLike[str], run: int = -1, *, discarded: bool = False) -> Record:
    """Read a record as columns with a row for each step, taken as it was last.

        steps = pandas.DataFrame(ad.log.read("run.jsonl"))
        steps.plot("step", "loss")

    The columns have the names of `ad.log.scalars`, and some more. NaN stands for what is unknown.

    * `step`, `epoch`, `seconds`, `at` (when the step ended, in seconds since 1970), `global_batch`, `workers`,
      `message_bytes`, `skipped`; `restores` since the step before, and the steps `repeated` after them.
    * the driver's metrics that are numbers, by their names; `hyperparameter/lr` and so on; and what `program.log` and
      `program.evaluate(log=…)` wrote after a step.
    * `seconds/input`, `seconds/computing`, …: `seconds` by cause, on the process that recorded it; `between/script`,
      `between/saving`, …: seconds between the step before and this one, by activity.
    * for each worker slot `batch_size/0`, …, and the seconds `input/0`, `computing/0`, `busy/0` and `waiting/0`, …: the
      time in which the worker waited for others, in all messages of the step. Zeros for an empty slot.
    * the values of hooks: `hook/0/adapt_batch_size/noise.scale`; arrays, if they are not single numbers.
    * objects, `None` in most rows: `decision`, `members`, `joined`, `lost`, `notes`, `asked` (the targets before the
      hooks ran), `script` (requests of the script), `origin` (of the process, in its first step), `why` (by hook: why
      it asked for nothing, where that has changed).

    Args:
      path: the file that `Program.run(record=…)` writes.
      run: index of the run, if the file holds several; by default the one that was written last.
      discarded: whether steps that a restore has discarded have rows, too; the column `discarded` tells them.

    Raises:
      RecordError: the file is not a record, has another version, or has no such run; or the run has no steps.
      OSError: the file cannot be read.
    """
    header, steps = read_run(path, run, discarded=discarded)
    rows: list[dict[str, Any]] = []
    blocks: list[dict[str, np.ndarray]] = []
    names: dict[str, dict[str, None]] = {"metrics": {}, "logged": {}}
    try:
        for _, fields in steps:
            rows.append(fields)
            if len(rows) == _BLOCK:
                blocks.append(_block(header, rows, names))
                rows = []
        blocks += [_block(header, rows, names)] if rows else []
    except RecordError:
        raise
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise RecordError(f"{path}: its steps are inconsistent: {error!r}.") from error
    if not blocks:
        raise RecordError(f"{path}: the run has no steps. Was it stopped before its first one was done?")
    columns = _joined(blocks)
    if not discarded:
        del columns["discarded"]
    return Record(header, columns, [*names["metrics"]], [*names["logged"]])


def _block(
    header: dict[str, Any], rows: list[dict[str, Any]], names: dict[str, dict[str, None]]
) -> dict[str, np.ndarray]:
    """Return the columns of some steps. Adds the names of metrics and logged values to `names`."""
    sizes = np.array([fields["batch_sizes"] for fields in rows], np.int64)
    columns = {name: _numbers([fields[name] for fields in rows]) for name in ("epoch", "seconds", "at")}
    kinds: dict[str, type] = dict.fromkeys(("step", "message_bytes", "restores", "repeated"), np.int64)
    kinds |= dict.fromkeys(("skipped", "discarded"), bool)
    columns |= {name: np.array([fields[name] for fields in rows], kind) for name, kind in kinds.items()}
    columns |= {"global_batch": sizes.sum(1), "workers": np.array([len(fields["members"]) for fields in rows])}
    parts = np.array([fields["breakdown"] for fields in rows], np.float64)
    columns |= {f"seconds/{name}": column for name, column in zip(header["breakdown"], parts.T, strict=True)}
    for what, prefix in (("hyperparameters", "hyperparameter/"), ("between", "between/")):
        columns |= {f"{prefix}{name}": _numbers(values) for name, values in _by_name(rows, what).items()}
    for hook in header["hooks"]:
        given = [fields["hooks"].get(hook["name"], ()) for fields in rows]  # nothing in a step that was skipped
        for place, leaf in enumerate(hook["leaves"]):
            values = [leaves[place] if place < len(leaves) else None for leaves in given]
            columns[f"hook/{hook['name']}/{leaf}"] = _numbers(values)
    columns |= {name: _objects([fields[name] or None for fields in rows]) for name in _OBJECTS}
    for what, known in names.items():
        found = {name: _numbers(values) for name, values in _by_name(rows, what).items() if name not in columns}
        known |= dict.fromkeys(found)
        columns |= found
    micro = [fields["microseconds"] for fields in rows]
    measured = ("input", "computing", "busy", "together")
    workers = {name: 1e-6 * np.array([each[name] for each in micro], np.int64) for name in measured}
    together, busy = workers.pop("together")[:, None], workers["busy"]
    found = {"batch_size": sizes, **workers, "waiting": np.where(busy > 0, together - busy, 0.0)}
    slots = range(header["workers"])
    return columns | {f"{name}/{slot}": values[:, slot] for name, values in found.items() for slot in slots}


def _by_name(rows: list[dict[str, Any]], what: str) -> dict[str, list[Any]]:
    """Return the values of a field of names and values, by name; `None` in rows that lack it."""
    names = dict.fromkeys(name for fields in rows for name in fields[what])
    return {name: [fields[what].get(name) for fields in rows] for name in names}


def _numbers(values: list[Any]) -> np.ndarray:
    """Return numbers as an array; lists of them, in some rows or all, as objects. `None` becomes NaN."""
    try:
        numbers = _array(values)
        return numbers if numbers.ndim == 1 else _objects(numbers)
    except (ValueError, TypeError):
        return _objects(map(_array, values))


def _array(values: Any) -> np.ndarray:
    try:
        return np.array(values, np.float64)
    except (ValueError, TypeError):
        return np.array(values, np.complex128)  # texts in a record


def _objects(values: Iterable[Any]) -> np.ndarray:
    listed = list(values)
    objects = np.empty(len(listed), object)
    for place, value in enumerate(listed):
        objects[place] = value
    return objects


def _joined(blocks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the columns of all blocks; what a block lacks is unknown."""
    names = dict.fromkeys(name for block in blocks for name in block)
    lacking = [np.full(len(block["step"]), np.nan) for block in blocks]
    return {
        name: np.concatenate([block.get(name, nan) for block, nan in zip(blocks, lacking, strict=True)])
        for name in names
    }
