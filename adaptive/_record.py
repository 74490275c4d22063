"""A trace of a run, as JSON lines: what the hooks were shown in every step, and what they decided.

With it a policy can be replayed, and another one tried, without the cluster. The first line is a header, then comes a
line for each step; `null` stands for NaN.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
        self._file = Path(path).open("a") if writes else None  # noqa: SIM115 - open as long as the run

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
        self, report: Report, previous: Sequence[int], epoch: float, barrier: Barrier, values: Sequence[list[jax.Array]]
    ) -> None:
        """One step. `values` are the leaves that each hook was given; none, where the step was skipped."""
        decision = report.decision
        self._line(
            kind="step",
            step=report.step,
            epoch=epoch,
            batch_sizes=list(report.batch_sizes),
            previous_batch_sizes=list(previous),
            seconds=report.seconds,
            message_bytes=report.message_bytes,
            hooks={
                name: [_plain(np.asarray(leaf).tolist()) for leaf in leaves]
                for name, leaves in zip(barrier.names, values, strict=False)
            },
            decision=None
            if decision is None
            else {"global_batch": decision.global_batch, "shares": decision.shares, "stop": decision.stop},
            notes=list(report.notes),
        )

    def _line(self, **fields: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(fields) + "\n")
            self._file.flush()  # a run that is killed leaves all its steps

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value
