"""Observations as the program would make them, and simulated runs, for tests of hooks and policies."""

from __future__ import annotations

from typing import Any, NamedTuple

from adaptive.base.decision import Limits, Observation
from controllers.simulate import simulate


class Noise(NamedTuple):
    """A noise scale and its bounds, as `mon.noise_scale` returns them."""

    scale: float
    lower: float
    upper: float


def path(policy, times, sizes, steps, **kwargs):
    """The splits that were tried, one after the other."""
    sim = simulate(policy, lambda _, b: times(b), sizes, steps, **kwargs)
    return sim.sizes[[0, *sim.changes]].tolist()


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
    workers: tuple[int, int, int] | None = None,
    members: tuple[int, ...] | None = None,
    limits: Limits | None = None,
    examples: int = 0,
) -> Observation:
    """`workers` are the target, the least and the most; by default they are those that there are."""
    n = len(batch_sizes)
    there = tuple(range(n)) if members is None else members
    target, least, most = workers or (len(there),) * 3
    takes_part = [i in there for i in range(n)]
    return Observation(
        step=step,
        epoch=step / 100,
        values=values,
        batch_sizes=tuple(batch_sizes),
        previous_batch_sizes=tuple(batch_sizes if previous is None else previous),
        global_batch=sum(batch_sizes) if global_batch is None else global_batch,
        limits=limits or Limits((lower,) * n, (upper,) * n, quantum).of(takes_part),
        due=due,
        members=there,
        target_workers=target,
        least_workers=least,
        most_workers=most,
        examples=examples,
    )
