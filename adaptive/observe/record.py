"""A record of a run, as JSON lines: the measurements of each step, the values that hooks received, and their decisions.

A record allows a policy to be replayed, and another policy to be tried, without the cluster. The first line is a
header with the run's id and the names of the leaves that hooks receive. One line per step follows. `null` stands for
NaN. Fields that rarely change are omitted from a line if they equal the previous line's (`AS_BEFORE`), which saves much
space with many workers.

The file only grows. Wherever step numbers do not continue, as after a restore or a restart, another header with the
same `run_id` follows. A step that was repeated has several lines, of which the last one counts (`recorded.py`);
`restored` marks the first one after a restore.

A record that cannot be written does not end the run; the run continues without it. Whole lines are written, about twice
a second: a run that is killed loses at most the lines of the last half second.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from adaptive.base.activity import Breakdown

from .events import StepEvent, Unsubscribe
from .line_file import LineFile

RECORD_VERSION = 4  # version 1 had no names of leaves, 2 omitted no fields, 3 removed repeated steps
READABLE_VERSIONS = (2, 3, 4)
AS_BEFORE = {
    "previous_batch_sizes": "batch_sizes",
    "members": "members",
    "asked": "asked",
    "hyperparameters": "hyperparameters",
}
"""Fields that a line may omit, and the field of the previous line that has the omitted value."""


class JSONL:
    """A sink that writes a line of JSON for each step, and a header before the first: the record of a run.

        program.run(epochs=10, log=[ad.log.JSONL("run.jsonl")])

    The record holds everything that an event does, decisions included; `python -m controllers.simulate` replays
    policies on it. `program.run(record=path)` does the same.

    Args:
      path: the file. Other runs in it stay; `adaptive report` and `adaptive replay` read the last run by default.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._file: LineFile | None = None
        self._before: dict[str, Any] = {}  # all fields of the last step
        self._last: tuple[str, int] | None = None  # run and step of the last line

    def write(self, event: StepEvent) -> None:
        """Add a line, and a header before it if the step does not follow the last one."""
        try:
            follows = self._last == (event.run_id, event.report.step - 1) and not event.restored
            if self._file is None or not follows:
                self._file, self._before = self._file or LineFile(self._path), {}
                self._file.write(_encode(_header(event)))
            fields = _step(event)
            line = {name: value for name, value in fields.items() if not self._as_before(name, value)}
            self._file.write(_encode(line))
            self._before, self._last = fields, (event.run_id, event.report.step)
        except OSError as error:
            raise self._no_more(error) from error

    def _as_before(self, name: str, value: Any) -> bool:
        return name in AS_BEFORE and self._before.get(AS_BEFORE[name]) == value

    def close(self) -> None:
        """Close the file; a later run adds lines to it."""
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError as error:
            raise self._no_more(error) from error

    def _no_more(self, error: OSError) -> Unsubscribe:
        if self._file is not None:
            with suppress(OSError):  # closing tries again to write the rest
                self._file.close()
            self._file = None
        return Unsubscribe(f"the run is not recorded any more: {error.strerror or error}: {self._path}")

    def __repr__(self) -> str:
        return f"JSONL({str(self._path)!r})"


def _header(event: StepEvent) -> dict[str, Any]:
    limits, sizes = event.limits, event.report.batch_sizes
    return {
        "kind": "header",
        "version": RECORD_VERSION,
        "run_id": event.run_id,
        "workers": len(sizes),
        "examples": limits.examples,
        "seed": event.seed,
        "global_batch": sum(sizes),
        "lower": list(limits.lower),
        "upper": list(limits.upper),
        "quantum": limits.quantum,
        "multiple": limits.multiple,
        "breakdown": Breakdown._fields,
        "hooks": [{"name": hook.name, "every": hook.every, "leaves": hook.names} for hook in event.hooks],
    }


def _step(event: StepEvent) -> dict[str, Any]:
    report, decision = event.report, event.report.decision
    by_script = [request.fields() for request in event.requests if not request.hook]
    return {
        "kind": "step",
        "step": report.step,
        "epoch": event.epoch,
        "batch_sizes": list(report.batch_sizes),
        "previous_batch_sizes": list(event.previous_batch_sizes),
        "members": list(report.members),
        "joined": list(report.joined),
        "asked": {
            "global_batch": event.asked.global_batch,
            "active": list(event.asked.active),
            "workers": list(event.asked.workers),
        },
        **({"script": by_script} if by_script else {}),
        "hyperparameters": dict(report.hyperparameters),
        **({"at": round(event.at, 6)} if event.at else {}),
        **({"between": {name: round(s, 6) for name, s in event.between.items()}} if event.between else {}),
        **({"origin": event.origin.fields()} if event.origin is not None else {}),
        **({"restored": True} if event.restored else {}),
        "seconds": report.seconds,
        "breakdown": _rounded(report.breakdown),
        "workers": {name: _rounded(seconds.tolist()) for name, seconds in event.workers._asdict().items()},
        "metrics": {name: _plain(value) for name, value in event.scalars.items()},
        "skipped": report.skipped,
        "lost": [str(loss) for loss in report.lost],
        "message_bytes": report.message_bytes,
        "call": event.limits.call_overhead,
        "hooks": {
            hook.name: [_plain(leaf.tolist()) for leaf in hook.values.values()] for hook in event.hooks if hook.values
        },
        "decision": None
        if decision is None
        else {
            "global_batch": decision.global_batch,
            "shares": decision.shares,
            "stop": decision.stop,
            "workers": decision.workers,
            "hyperparameters": decision.hyperparameters,
            "by": list(event.decided),
            "requests": [request.fields() for request in event.requests if request.hook],
        },
        "notes": list(report.notes),
    }


def _rounded(seconds: Iterable[float]) -> list[float]:
    """Round to microseconds, which keeps the record of many workers short."""
    return [round(s, 6) for s in seconds]


def _as_json(value: Any) -> Any:
    """Encode a value that JSON has no form for: NumPy numbers, which policies may return, as numbers; else as text."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "fiub" else str(value)


_encode = json.JSONEncoder(default=_as_json).encode


def _plain(value: Any) -> Any:
    """Replace NaN by `None` and infinities by strings, since JSON has neither."""
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value
