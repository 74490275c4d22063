"""A cluster on paper: run a policy against step times that are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from adaptive._decision import Decision, Limits, Observation
from adaptive._sizes import split

from ._policy import Policy


class Simulation(NamedTuple):
    """What happened, step by step."""

    sizes: np.ndarray  # shape=(steps, n), examples per worker
    seconds: np.ndarray  # shape=(steps, n), compute seconds per worker
    decisions: list[tuple[int, Decision]]  # (step, what was asked for behind it)

    @property
    def step_seconds(self) -> np.ndarray:
        """Seconds per step: those of the slowest worker; shape=(steps,)."""
        return self.seconds.max(axis=1)

    @property
    def changes(self) -> np.ndarray:
        """The steps before which the split changed."""
        return 1 + np.flatnonzero((np.diff(self.sizes, axis=0) != 0).any(axis=1))


def simulate(
    policy: Policy,
    times: Callable[[int, np.ndarray], np.ndarray],
    sizes: Sequence[int],
    steps: int,
    *,
    every: int = 1,
    jitter: float = 0.0,
    seed: int = 0,
    limits: Limits | None = None,
    global_batch: Callable[[int], int] | None = None,
    values: Callable[[int, np.ndarray], tuple[Any, ...]] | None = None,
) -> Simulation:
    """Run a policy as a program would, on workers whose step times are given.

    Args:
      policy: decides from the workers' seconds.
      times: `times(step, sizes) -> seconds`, shape=(n,).
      sizes: examples per worker in the first step.
      steps: how many.
      every: as for `hook`.
      jitter: relative standard deviation of the times.
      seed: for the jitter.
      limits: by default at least one example and any number of them.
      global_batch: another hook's rule, `global_batch(step) -> examples` in the step behind it.
      values: `values(step, seconds)`: what the hook is given. By default the seconds, which like a program's are
        those of the step before.

    Returns:
      Sizes and times of all steps, and the decisions.
    """
    rng = np.random.default_rng(seed)
    n = len(sizes)
    limits = limits or Limits((1,) * n, (10**9,) * n)
    current = previous = np.asarray(sizes, np.int64)
    state = policy.init(n)
    measured = np.full(n, np.nan)
    all_sizes, all_seconds, decisions = [], [], []
    for step in range(1, steps + 1):
        seconds = times(step, current) * (1 + jitter * np.clip(rng.standard_normal(n), -3, 3))
        all_sizes.append(current)
        all_seconds.append(seconds)
        total = int(current.sum()) if global_batch is None else global_batch(step)
        observation = Observation(
            step=step,
            epoch=0.0,
            values=values(step, measured) if values else (measured,),
            batch_sizes=tuple(current.tolist()),
            previous_batch_sizes=tuple(previous.tolist()),
            global_batch=total,
            limits=limits,
            due=step % every == 0,
        )
        decision, state = policy.update(observation, state)
        previous, measured = current, seconds
        if not observation.due or decision is None:
            decision = Decision()
        elif decision:
            decisions.append((step, decision))
        current = _apply(decision, total, current, limits)
    return Simulation(np.array(all_sizes), np.array(all_seconds), decisions)


def _apply(decision: Decision, total: int, sizes: np.ndarray, limits: Limits) -> np.ndarray:
    total = total if decision.global_batch is None else decision.global_batch
    shares = sizes.tolist() if decision.shares is None else decision.shares
    return np.array(split(total, shares, limits), np.int64)
