"""The record of a run: a line of JSON for each step, with the values that hooks received and their decisions.

A record allows a policy to be replayed, and another policy to be tried, without the cluster. `reader.py` describes its
lines, and reads them. A record that cannot be written does not end the run.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

import numpy as np

from adaptive.base.activity import Breakdown

from .events import StepEvent
from .line_file import LineSink
from .reader import VERSION


class JSONL(LineSink):
    """A sink that writes a line of JSON for each step, and a header before the first: the record of a run.

        program.run(epochs=10, log=[ad.log.JSONL("run.jsonl")])

    The record holds everything that an event does, decisions included. `ad.log.read` returns it as columns;
    `adaptive report` and `adaptive replay` read it. `program.run(record=path)` writes it too. The file only grows.

    Args:
      path: the file. Other runs in it stay; readers take the last run by default.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path)
        self._run_id = ""
        self._why: dict[str, str] = {}  # by hook, as written last

    def write(self, event: StepEvent) -> None:
        """Add a line."""
        if self._file is None or event.run_id != self._run_id:
            if self._file is None:
                self._open()
            self._run_id, self._why = event.run_id, {}
            self._append(_encode(_header(event)))
        why = {hook.name: hook.why for hook in event.hooks if hook.why != self._why.get(hook.name, "")}
        self._why |= why
        self._append(_encode(_step(event) | ({"why": why} if why else {})))


def _header(event: StepEvent) -> dict[str, Any]:
    return {
        "kind": "header",
        "version": VERSION,
        "run_id": event.run_id,
        "workers": len(event.report.batch_sizes),
        "seed": event.seed,
        "global_batch": event.report.global_batch,
        **_fields(event.limits, "examples", "lower", "upper", "quantum", "multiple"),
        "breakdown": Breakdown._fields,
        "hooks": [{"name": hook.name, "every": hook.every, "leaves": hook.names} for hook in event.hooks],
    }


def _step(event: StepEvent) -> dict[str, Any]:
    report, decision, asked = event.report, event.report.decision, event.asked
    targets = {"global_batch": asked.global_batch, "workers": asked.workers}
    line = {
        "kind": "step",
        "run_id": event.run_id,
        "step": report.step,
        **({"restored": True} if event.restored else {}),
        "epoch": event.epoch,
        **_fields(report, "examples", "batch_sizes", "seconds", "message_bytes"),
        "asked": targets | ({} if asked.active == report.members else {"active": asked.active}),
        "breakdown": [round(s, 6) for s in report.breakdown],
        "microseconds": _microseconds(event),
        "metrics": {name: _plain(value) for name, value in event.scalars.items()},
        "skipped": report.skipped or event.scalars.get("skipped") == 1,
        "quantum": event.limits.quantum,
        "call": event.limits.call_overhead,
        "hooks": {
            hook.name: [_plain(leaf.tolist()) for leaf in hook.values.values()] for hook in event.hooks if hook.values
        },
    }
    if event.previous_batch_sizes != report.batch_sizes:
        line["previous_batch_sizes"] = event.previous_batch_sizes
    if report.members != (*range(len(report.batch_sizes)),):
        line["members"] = report.members
    if decision is not None:
        line["decision"] = {
            **_fields(decision, "global_batch", "shares", "stop", "workers", "hyperparameters"),
            "by": event.decided,
            "requests": [request.fields() for request in event.requests if request.hook],
        }
    others = {
        **_fields(report, "joined", "notes", "hyperparameters"),
        "lost": [str(loss) for loss in report.lost],
        "script": [request.fields() for request in event.requests if not request.hook],
        "logged": {name: _plain(value) for name, value in event.logged.items()},
        "at": round(event.at, 6),
        "between": {name: round(s, 6) for name, s in event.between.items()},
        "origin": event.origin,
    }
    return line | {name: value for name, value in others.items() if value}


def _fields(of: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


def _microseconds(event: StepEvent) -> dict[str, Any]:
    """Return the seconds of all workers in whole microseconds. All workers are busy or waiting for equally long."""
    input_, computing, busy, waiting = (np.rint(1e6 * seconds).astype(np.int64) for seconds in event.workers)
    together = int((busy + waiting).max(initial=0))
    return {"input": input_.tolist(), "computing": computing.tolist(), "busy": busy.tolist(), "together": together}


def _as_json(value: Any) -> Any:
    """Encode a value that JSON has no form for: NumPy numbers, which policies may return, as numbers; else as text."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "fiub" else str(value)


_encode = json.JSONEncoder(default=_as_json, separators=(",", ":")).encode


def _plain(value: Any) -> Any:
    """Replace NaN by `None` and infinities by strings, since JSON has neither."""
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value
