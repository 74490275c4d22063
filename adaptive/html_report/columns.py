"""A recorded run as the report's functions read it: arrays with a row per step, and seconds by cause.

Seconds by cause come from the process that recorded. It may wait more or less than others do, so what each worker
reports of itself replaces its own: waiting, input and computing are means over the workers everywhere in a report.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from adaptive.observe.ledger import Ledger, ledger_of
from adaptive.observe.reader import Record, read

_NOISE = ("scale", "lower", "upper")  # a value with parts of these names is a noise scale
_OWN = ("step", "epoch", "seconds", "at", "global_batch", "workers", "message_bytes", "restores", "repeated")
_PREFIXES = ("seconds", "between", "hyperparameter", "batch_size", "input", "computing", "busy", "waiting", "hook")
_MEANS = ("input", "computing", "waiting")


class RequestRow(NamedTuple):
    """A request of a hook or of the script: the row of the step before it, who made it, and its fields."""

    row: int
    by: str
    wish: Mapping[str, Any]


class Columns:
    """One recorded run of T steps and n worker slots; each step has one row, as it was taken last.

    Args:
      executed: the columns of all executed steps, with those that a restore discarded.

    Attributes:
      record: the columns by name.
      step: numbers of the steps; shape=(T,).
      seconds: duration of each step on the process that recorded it; shape=(T,).
      skipped: whether the step was skipped; shape=(T,).
      sizes: examples of each worker; shape=(T, n).
      parts: seconds by cause, of the process that recorded them, by name; shape=(T,).
      workers: seconds "input", "computing", "busy" and "waiting" of each worker; shape=(T, n). NaN for an empty slot
        and in steps that are not `plain`.
      metrics: metrics by name, losses first, without parts of noise scales; shape=(T,).
      logged: what `program.log` wrote, by name; NaN in most rows; shape=(T,).
      noise: noise scales with their bounds, by name; shape=(T, 3).
    """

    def __init__(self, executed: Record):
        discarded = executed["discarded"]
        self._executed = executed
        self.record = record = executed.where(~discarded) if discarded.any() else executed
        self.header = record.header
        self.step, self.skipped, self.seconds = record["step"], record["skipped"], np.nan_to_num(record["seconds"])
        self.sizes = record.of_workers("batch_size")
        self.parts = {name: np.nan_to_num(record[f"seconds/{name}"]) for name in self.header["breakdown"]}
        known = (record.of_workers("busy") > 0) & self.plain[:, None]
        self.workers = {name: np.where(known, record.of_workers(name), np.nan) for name in (*_MEANS, "busy")}
        numbers = {name: c for name, c in record.items() if c.dtype == np.float64}
        hooks = {name.split("/", 3)[3]: values for name, values in numbers.items() if name.startswith("hook/")}
        scalars = {n: c for n, c in numbers.items() if n not in _OWN and n.partition("/")[0] not in _PREFIXES}
        self.noise = _noise_scales(hooks) | _noise_scales(scalars)
        losses_first = sorted(scalars, key=lambda name: "loss" not in name)
        shown = {name: scalars[name] for name in losses_first if not self._is_noise(name, scalars[name])}
        self.logged = {name: column for name, column in shown.items() if name in record.logged}
        self.metrics = {name: column for name, column in shown.items() if name not in record.logged}

    def __len__(self) -> int:
        return len(self.step)

    def _is_noise(self, name: str, values: np.ndarray) -> bool:
        """Return whether a metric is a part of a noise scale, or the same numbers."""
        same = (np.allclose(values, scale[:, 0], 1e-4, equal_nan=True) for scale in self.noise.values())
        return name.rpartition(".")[0] in self.noise or (bool(np.isfinite(values).any()) and any(same))

    @property
    def n(self) -> int:
        """The number of worker slots."""
        return int(self.sizes.shape[1])

    @cached_property
    def plain(self) -> np.ndarray:
        """Whether a step has none of the events that make steps longer: a process that starts, a restore, a worker that
        joins or is lost, values that are not finite; shape=(T,).
        """
        events = [self.record[name].astype(bool) for name in ("origin", "joined", "lost")]
        first = np.arange(len(self)) == 0
        return ~np.logical_or.reduce([first, self.skipped, self.record["restores"] > 0, *events])

    @cached_property
    def by_step(self) -> dict[str, np.ndarray]:
        """The seconds of each step by cause, as means over the workers; shape=(T,) each, together `seconds`."""
        found, known = dict(self.parts), np.isfinite(self.workers["busy"])
        some, count = known.any(1), np.maximum(known.sum(1), 1)
        off = np.abs(np.nansum(self.workers["waiting"], 0) - self.parts["waiting"][some].sum())
        recorder = int(np.where(known.any(0), off, np.inf).argmin())
        for name in _MEANS:
            values, part = self.workers[name], self.parts[name]
            own = np.nan_to_num(values[:, recorder]) if name == "computing" else part
            means = np.maximum(part + np.nansum(values, 1) / count - own, 0)
            found[name] = np.where(some & known[:, recorder], means, part)
        found["other"] = np.maximum(self.seconds - sum(s for name, s in found.items() if name != "other"), 0)
        return found

    @cached_property
    def ledger(self) -> Ledger:
        """The seconds of the whole run by cause, as means over the workers; together the time that it took."""
        ledger, added = ledger_of(self._executed), 0.0
        found = dict(ledger.seconds)
        for name in _MEANS:
            more = float((self.by_step[name] - self.parts[name])[self.plain].sum())
            found[name], added = found[name] + more, added + more
        for name in ("other", "script", "computing"):  # what the recorder did beyond the workers' mean, or short of it
            taken = min(added, found[name])
            found[name], added = found[name] - taken, added - taken
        return ledger._replace(seconds=found)

    @cached_property
    def global_batch(self) -> np.ndarray:
        """Global batch size; shape=(T,)."""
        return self.sizes.sum(1)

    @cached_property
    def examples(self) -> np.ndarray:
        """Total number of examples, up to the end of each step; shape=(T,)."""
        return self.global_batch.cumsum()

    @cached_property
    def elapsed(self) -> np.ndarray:
        """Total seconds in steps, up to the end of each step; shape=(T,)."""
        return self.seconds.cumsum()

    @cached_property
    def resized(self) -> np.ndarray:
        """The rows whose batch sizes differ from those of the row before; shape=(c,)."""
        return np.flatnonzero((self.sizes[1:] != self.sizes[:-1]).any(1)) + 1

    @cached_property
    def hyperparameters(self) -> dict[str, np.ndarray]:
        """Hyperparameters by name; shape=(T,), objects for lists."""
        prefix = "hyperparameter/"
        return {name.removeprefix(prefix): values for name, values in self.record.items() if name.startswith(prefix)}

    @cached_property
    def requests(self) -> list[RequestRow]:
        """All requests, in order."""
        found = []
        for row, (script, decision) in enumerate(zip(self.record["script"], self.record["decision"], strict=True)):
            found += [RequestRow(max(row - 1, 0), wish["script"], wish) for wish in script or ()]
            found += [RequestRow(row, wish["hook"], wish) for wish in (decision or {}).get("requests", ())]
        return found


def read_columns(path: str | Path, run: int = -1) -> Columns:
    """Read one run of a record.

    Raises:
      RecordError: the file is not a record, or has no such run, or the run has no steps.
      OSError: the file cannot be read.
    """
    return Columns(read(path, run, discarded=True))


def _noise_scales(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the values whose parts are those of a noise scale, by name; shape=(T, 3)."""
    roots = dict.fromkeys(name.rpartition(".")[0] for name in values)
    parts = {root: [f"{root}.{part}".removeprefix(".") for part in _NOISE] for root in roots}
    return {
        root or "noise scale": np.stack([values[name] for name in names], 1)
        for root, names in parts.items()
        if all(name in values for name in names)
    }


def windows(rows: int, most: int) -> np.ndarray:
    """Return the first row of each of at most `most` windows of nearly equal length; shape=(windows,)."""
    return np.unique(np.linspace(0, rows, min(rows, most), endpoint=False).astype(int))


def mean_in(values: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Return the mean of the finite values of each window, NaN where there are none; shape=(windows, …)."""
    known = np.isfinite(values)
    count = np.add.reduceat(known, begins, axis=0, dtype=np.int64)
    total = np.add.reduceat(np.where(known, values, 0), begins, axis=0, dtype=np.float64)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
