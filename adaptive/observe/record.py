"""A record of a run, as JSON lines: the measurements of each step, the values that hooks received, and their decisions.

A record allows a policy to be replayed, and another policy to be tried, without the cluster. The first line is a
header with the run's id and the names of the leaves that hooks receive. One line per step follows. `null` stands for
NaN. Fields that rarely change are omitted from a line if they equal the previous line's (`AS_BEFORE`), which saves much
space with many workers.

When the run resumes from an earlier step, the lines of later steps are removed (`record_resume.py`), and the field
`resumed` of the next line gives their number and duration. If the first header no longer holds, as after a restart with
another number of workers, another header with the same `run_id` follows.

A record that cannot be written does not end the run; the run continues without it. Only whole lines are written, about
twice a second: a run that is killed loses at most the lines of the last half second.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from adaptive.base.activity import Breakdown

from .events import StepEvent, Unsubscribe
from .record_resume import HeldBack, hold_back
from .rewriting import as_left, note_left
from .sinks import Resumption

RECORD_VERSION = 3  # version 1 had no names of leaves, 2 omitted no fields
READABLE_VERSIONS = (2, 3)
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
        self._file: IO[str] | None = None
        self._before: dict[str, Any] = {}  # all fields of the last step
        self._header: dict[str, Any] | None = None  # the header of this run's lines at the end of the file
        self._resumed: list[dict[str, Any]] = []  # for the next line
        self._last: tuple[str, int] | None = None  # run and step of the last line

    def resume(self, resumption: Resumption) -> None:
        """Remove the lines of this run's later steps."""
        self.close()
        try:
            left = as_left(self._path, resumption.run_id, resumption.step)
            held = hold_back(self._path, resumption) if left is None else HeldBack(left.head, [])
        except OSError as error:
            raise self._no_more(error) from error
        self._header, self._resumed = held.header, held.resumed

    def write(self, event: StepEvent) -> None:
        """Add a line, and a header before it if the last header does not hold for it."""
        try:
            if self._file is None:
                self._file, self._before = _opened(self._path), {}
                self._write_header(_header(event))
            fields = _step(event)
            line = {name: value for name, value in fields.items() if not self._as_before(name, value)}
            if self._resumed:
                line["resumed"], self._resumed = self._resumed, []
            _write(self._file, line)
            self._before, self._last = fields, (event.run_id, event.report.step)
        except OSError as error:
            raise self._no_more(error) from error

    def _write_header(self, header: dict[str, Any]) -> None:
        assert self._file is not None
        text = _encode(header)
        if self._header is None or _lasting(json.loads(text)) != _lasting(self._header):
            self._file.write(text + "\n")
            self._header = json.loads(text)

    def flush(self) -> None:
        """Pass what was written to the operating system, so that it survives this process."""
        try:
            if self._file is not None:
                self._file.flush()
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
                if self._last is not None:
                    note_left(self._path, *self._last, self._header)
        except OSError as error:
            raise self._no_more(error) from error
        finally:
            self._header = None

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


_PASSING = ("global_batch", "quantum")  # hold for the first step only


def _lasting(header: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a header that hold for all steps below it."""
    return {name: value for name, value in header.items() if name not in _PASSING}


def _step(event: StepEvent) -> dict[str, Any]:
    report, decision = event.report, event.report.decision
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
            "by": [cause.fields() for cause in event.asked.by],
        },
        **({"causes": [cause.fields() for cause in event.causes]} if event.causes else {}),
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
            "requests": [request.fields() for request in event.requests],
        },
        "notes": list(report.notes),
    }


def _rounded(seconds: Iterable[float]) -> list[float]:
    """Round to microseconds, which keeps the record of many workers short."""
    return [round(s, 6) for s in seconds]


def _write(file: IO[str], fields: dict[str, Any]) -> None:
    file.write(_encode(fields) + "\n")


def _opened(path: Path) -> IO[str]:
    """Open a record for appending. Ends the last line first if it was cut when its run was killed."""
    cut = False
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as before:
            before.seek(-1, os.SEEK_END)
            cut = before.read() != b"\n"
    file = path.open("a")
    file.write("\n" * cut)
    return file


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
