"""A trace of a run, as JSON lines: what the hooks were shown in every step, and what they decided.

With it a policy can be replayed, and another one tried, without the cluster. The first line is a header, then comes a
line for each step; `null` stands for NaN.

A record is beside the point of a run, and never ends it: where it cannot be written, the run goes on without.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from ._barrier import Barrier, Sizes
from ._report import Report

VERSION = 1


class Recorder:
    """Appends to one file. Only rank 0 writes; the others' recorders do nothing.

    Args:
      path: the file; lines are added behind those of an earlier run.
      writes: whether this process is the one that writes.
    """

    def __init__(self, path: str | Path, *, writes: bool):
        self._path, self._lost = Path(path), ""
        self._file: IO[str] | None = None
        if writes:
            try:
                self._file = _opened(self._path)
            except OSError as error:
                self._lose(error)

    def header(self, barrier: Barrier, sizes: Sizes, *, seed: int) -> None:
        self._line(
            kind="header",
            version=VERSION,
            workers=len(sizes.current),
            examples=sizes.examples,
            seed=seed,
            global_batch=sum(sizes.current),
            lower=list(sizes.limits.lower),
            upper=list(sizes.limits.upper),
            quantum=sizes.limits.quantum,
            multiple=sizes.limits.multiple,
            hooks=[{"name": name, "every": h.every} for name, h in zip(barrier.names, barrier.hooks, strict=True)],
        )

    def step(
        self,
        report: Report,
        previous: Sequence[int],
        epoch: float,
        barrier: Barrier,
        values: Sequence[list[jax.Array]],
        call: float,
    ) -> str:
        """One step. `values` are the leaves that each hook was given; none, where the step was skipped. `call` is what
        one more kernel call costs, in examples.

        Returns:
          A note on what cannot be recorded from this step on, once; else nothing.
        """
        decision = report.decision
        self._line(
            kind="step",
            step=report.step,
            epoch=epoch,
            batch_sizes=list(report.batch_sizes),
            previous_batch_sizes=list(previous),
            seconds=report.seconds,
            message_bytes=report.message_bytes,
            call=call,
            hooks={
                name: [_plain(np.asarray(leaf).tolist()) for leaf in leaves]
                for name, leaves in zip(barrier.names, values, strict=False)
            },
            decision=None
            if decision is None
            else {"global_batch": decision.global_batch, "shares": decision.shares, "stop": decision.stop},
            notes=list(report.notes),
        )
        note, self._lost = self._lost, ""
        return note

    def _line(self, **fields: Any) -> None:
        if self._file is not None:
            line = json.dumps(fields, default=_as_json) + "\n"
            try:
                self._file.write(line)
                self._file.flush()  # a run that is killed leaves all its steps
            except OSError as error:
                self._lose(error)

    def _lose(self, error: OSError) -> None:
        self.close()
        self._file, self._lost = None, f"the run is not recorded any more: {error.strerror or error}: {self._path}"
        logging.getLogger("adaptive").warning("%s", self._lost)

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # what could not be written is tried once more
                self._file.close()


def _opened(path: Path) -> IO[str]:
    """For adding lines: on a line of their own, should the last one have been cut by the end of its run."""
    cut = False
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as before:
            before.seek(-1, os.SEEK_END)
            cut = before.read() != b"\n"
    file = path.open("a")
    file.write("\n" * cut)
    return file


def _as_json(value: Any) -> Any:
    """What JSON has no form for: numbers of numpy's, which policies may decide with, and what is no number at all."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "fiub" else str(value)


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value
