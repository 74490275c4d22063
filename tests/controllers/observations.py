"""Observations as the program would make them, for tests of hooks and policies."""

from __future__ import annotations

from typing import Any

from adaptive.base.decision import Limits, Observation


def observe(
    *values: Any,
    step: int = 1,
    batch_sizes: tuple[int, ...] = (32, 32),
    previous: tuple[int, ...] | None = None,
    global_batch: int | None = None,
    lower: int = 1,
    upper: int = 4096,
    quantum: int = 1,
    due: bool = True,
) -> Observation:
    n = len(batch_sizes)
    return Observation(
        step=step,
        epoch=step / 100,
        values=values,
        batch_sizes=tuple(batch_sizes),
        previous_batch_sizes=tuple(batch_sizes if previous is None else previous),
        global_batch=sum(batch_sizes) if global_batch is None else global_batch,
        limits=Limits((lower,) * n, (upper,) * n, quantum),
        due=due,
    )
