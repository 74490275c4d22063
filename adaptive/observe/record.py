"""The record of a run: a line of JSON for each step, with the values that hooks received and their decisions.

A record allows a policy to be replayed, and another policy to be tried, without the cluster. `reader.py` describes its
lines, and reads them. A record that cannot be written does not end the run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from adaptive.base.activity import Breakdown

from .events import StepEvent
from .line_file import LineFile
from .reader import VERSION


class JSONL:
    """A sink that writes a line of JSON for each step, and a header before the first: the record of a run.

        program.run(epochs=10, log=[ad.log.JSONL("run.jsonl")])

    The record holds everything that an event does, decisions included. `ad.log.read` returns it as columns;
    `adaptive report` and `adaptive replay` read it. `program.run(record=path)` writes it too. The file only grows.

    Args:
      path: the file. Other runs in it stay; readers take the last run by default.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._file: LineFile | None = None
        self._run_id = ""
        self._why: dict[str, str] = {}  # by hook, as written last

    def write(self, event: StepEvent) -> None:
        """Add a line."""
        if self._file is None or event.run_id != self._run_id:
            self._file = self._file or LineFile(self._path)
            self._run_id, self._why = event.run_id, {}
            self._file.write(_encode(_header(event)))
        why = {hook.name: hook.why for hook in event.hooks if hook.why != self._why.get(hook.name, "")}
        self._why |= why
        self._file.write(_encode(_step(event) | ({"why": why} if why else {})))

    def close(self) -> None:
        """Close the file; a later run adds lines to it."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __repr__(self) -> str:
        return f"JSONL({str(self._path)!r})"


def _header(event: StepEvent) -> dict[str, Any]:
    limits, sizes = event.limits, event.report.batch_sizes
    return {
        "kind": "header",
        "version": VERSION,
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
        "run_id": event.run_id,
        "step": report.step,
        **({"restored": True} if event.restored else {}),
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
