"""A recorded run as the report's functions read it: arrays with a row per step, and seconds by cause."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from adaptive.base.activity import WorkerSeconds
from adaptive.observe.ledger import is_usual, ledger_of, mean_seconds
from adaptive.observe.reader import read
from adaptive.observe.scalars import NOISE, noise_roots


class RequestRow(NamedTuple):
    """A request of a hook or of the script: the row of the step before it, who made it, and its fields."""

    row: int
    by: str
    wish: Mapping[str, Any]


class Columns:
    """One recorded run of T steps and n worker slots, each step as taken last. Arguments and errors as of `read`.

    Attributes:
      record, ledger: the columns, and the seconds of the whole run by cause.
      by_step: the seconds of each step by cause (`mean_seconds`); shape=(T,) each.
      elapsed, examples: seconds in steps, and examples, up to the end of each step; shape=(T,).
      sizes, global_batch: examples of each worker, shape=(T, n), and their sum; `resized` are the rows that differ.
      workers: seconds of each worker by name; shape=(T, n). NaN for an empty slot and in steps that are not usual.
      noise: noise scales with their bounds, by name; shape=(T, 3).
      metrics, logged, hyperparameters: columns by name; metrics have losses first, and no parts of noise scales.
    """

    def __init__(self, path: str | Path, run: int = -1):
        executed = read(path, run, discarded=True)
        self.ledger = ledger_of(executed)
        self.record = record = executed.where(~executed["discarded"])
        self.by_step = mean_seconds(record)
        self.step, self.skipped, self.seconds = record["step"], record["skipped"], np.nan_to_num(record["seconds"])
        self.elapsed = self.seconds.cumsum()
        self.sizes = record.of_workers("batch_size")
        self.n = self.sizes.shape[1]
        self.resized = np.flatnonzero((self.sizes[1:] != self.sizes[:-1]).any(1)) + 1
        self.global_batch = self.sizes.sum(1)
        self.examples = self.global_batch.cumsum()
        known = (record.of_workers("busy") > 0) & is_usual(record)[:, None]
        self.workers = {name: np.where(known, record.of_workers(name), np.nan) for name in WorkerSeconds._fields}
        values = {_short(name): column for name, column in record.items() if column.dtype == np.float64}
        self.noise = {
            root.rstrip(".") or "noise scale": np.stack([values[root + field] for field in NOISE], 1)
            for root in noise_roots(tuple(values))
        }
        losses_first = sorted(record.metrics, key=lambda name: "loss" not in name)
        self.metrics = {name: record[name] for name in losses_first if name.rpartition(".")[0] not in self.noise}
        self.logged = {name: record[name] for name in record.logged}
        self.hyperparameters = record.named("hyperparameter/")
        self.requests: list[RequestRow] = []
        for row, (script, decision) in enumerate(zip(record["script"], record["decision"], strict=True)):
            self.requests += [RequestRow(max(row - 1, 0), wish["script"], wish) for wish in script or ()]
            self.requests += [RequestRow(row, wish["hook"], wish) for wish in (decision or {}).get("requests", ())]

    def __len__(self) -> int:
        return len(self.step)


def _short(name: str) -> str:
    """Return the name of a value of a hook, or of a metric; "" for other columns."""
    return name.split("/", 3)[3] if name.startswith("hook/") else "" if "/" in name else name


def windows(rows: int, most: int) -> np.ndarray:
    """Return the first row of each of at most `most` windows of nearly equal length; shape=(windows,)."""
    return np.unique(np.linspace(0, rows, min(rows, most), endpoint=False).astype(int))


def mean_in(values: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Return the mean of the finite values of each window, NaN where there are none; shape=(windows, …)."""
    known = np.isfinite(values)
    count = np.add.reduceat(known, begins, axis=0, dtype=np.int64)
    total = np.add.reduceat(np.where(known, values, 0), begins, axis=0, dtype=np.float64)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
