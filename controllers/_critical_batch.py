"""`measure_critical_batch`: measures by trials how large the batch of a run may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import inf, lcm, nan
from typing import Any, NamedTuple

import numpy as np

from adaptive import DriverError, NonFiniteError, Program
from adaptive.base.process.source_lines import at, current_line
from adaptive.base.values.numbers import whole

POINTS = 8  # number of points of the base branch at which its loss is evaluated
_CANDIDATES = np.geomspace(1e-2, 1e4, 6001)  # critical batches, in base batches


class BatchBranch(NamedTuple):
    """The result of one branch of `measure_critical_batch`. Replicated."""

    batch: int  # examples per step
    steps: int
    loss: float  # after the branch; inf if it diverged
    efficiency: float  # examples that the base batch needs for this loss, over those used; from 0 to 1


class CriticalBatch(NamedTuple):
    """The result of `measure_critical_batch`. Replicated. Prints as a table."""

    branches: tuple[BatchBranch, ...]
    start_loss: float
    critical: float  # the batch at which an example contributes half as much as in a small batch; NaN: no progress
    largest_equal: int  # the largest batch whose loss is within the tolerance of the base batch's
    noise_scale: float  # as given, for comparison; NaN if not given

    def __str__(self) -> str:
        rows = [f"{b.batch:>8} {b.steps:>7} {b.loss:>10.4f} {b.efficiency:>11.2f}" for b in self.branches]
        text = [f"{'batch':>8} {'steps':>7} {'loss':>10} {'efficiency':>11}", *rows]
        text.append(f"loss at the start {self.start_loss:.4f}; largest batch with an equal loss {self.largest_equal}")
        ratio = f", {self.noise_scale / self.critical:.2g} times that" if self.critical > 0 else ""
        noise = f"; noise scale {self.noise_scale:.4g}{ratio}" if self.noise_scale == self.noise_scale else ""
        return "\n".join([*text, f"critical batch {self.critical:.4g}{noise}"])


def measure_critical_batch(
    program: Program,
    loss_fn: Callable[[Any, Any], Any],
    data: Any,
    *,
    examples: int,
    factors: Sequence[int] = (1, 2, 4, 8),
    hyperparameters: Callable[[int], Mapping[str, Any]] | None = None,
    noise_scale: Any = None,
    tolerance: float = 0.01,
    batch: int = 256,
) -> CriticalBatch:
    """Measure the critical batch of a run by branches with larger batches. Call it on every process, between steps.

        print(ctrl.measure_critical_batch(program, loss_fn, test, examples=20_000, noise_scale=noise))

    For each `k` of `factors`, the program trains a branch on the same examples with `k` times its batch `B`, and then
    restores the present state bit for bit (`Program.branch`). A branch's efficiency is the number of examples after
    which the base branch (`k = 1`, evaluated at eight points) has the same loss, divided by the examples used. The
    critical batch is the least-squares fit of `(critical + B) / (critical + k B)` to all branches. Unlike the noise
    scale, it also depends on the optimizer and on the rule for the learning rate.

    Args:
      program: the program; its present global batch is the base batch.
      loss_fn, data, batch: the loss, a mean over held-out examples; see `Program.evaluate`.
      examples: training examples of each branch, rounded down to whole steps; enough for the loss to fall by several
        times `tolerance`.
      factors: batch sizes of the branches, in base batches; ascending from 1.
      hyperparameters: `hyperparameters(k)` returns the values to set for `k` times the base batch, such as
        `lambda k: {"lr": 3e-4 * k**0.5}`. By default the driver's own rule (`scale_adamw`, `scale_by_batch`) adapts the
        learning rate.
      noise_scale: a number, or the result of `monitors.noise_scale`, to print beside the critical batch.
      tolerance: losses that differ by at most this count as equal; in the loss's unit.

    Returns:
      A table of the branches, and the critical batch in examples: inf if no branch is less efficient than the base.

    Raises:
      DriverError: an argument is out of range, or neither the driver nor `hyperparameters` adapts the learning rate.
      BatchSizeError: the workers cannot hold the largest batch.

    References:
      Merrill et al. 2025, "Critical batch size revisited" (arXiv 2505.23971), sections 2 and 3, for branches and
      `largest_equal`; McCandlish et al. 2018, "An empirical model of large-batch training", eq. 2.7.
    """
    base = program.global_batch
    examples, factors = _check(program, base, examples, factors, hyperparameters)
    noise = float(getattr(noise_scale, "scale", nan if noise_scale is None else noise_scale))

    def loss() -> float:
        return float(program.evaluate(loss_fn, data, batch=batch))

    start, course, branches = loss(), [0.0], list[BatchBranch]()
    for k in factors:
        steps = examples // (k * base)
        marks = {round(i * steps / POINTS) for i in range(1, POINTS)} if k == 1 else set()
        with program.branch(global_batch=k * base, **(hyperparameters(k) if hyperparameters else {})):
            losses = [start, *_train(program, steps, marks, loss)]
        course = losses if k == 1 else course
        branches.append(BatchBranch(k * base, steps, losses[-1], _worth(losses[-1], course) if k > 1 else 1.0))
    first = branches[0].loss
    equal = max(b.batch for b in branches if b.loss <= first + tolerance)
    critical = _fit([b.efficiency for b in branches], factors) * base if first < start else nan
    return CriticalBatch(tuple(branches), start, critical, equal, noise)


def _train(program: Program, steps: int, marks: set[int], loss: Callable[[], float]) -> list[float]:
    """Take steps. Returns the losses after the steps in `marks` and after the last one; inf once training diverges."""
    losses = []
    try:
        for step in range(1, steps + 1):
            program.step()
            if step in marks or step == steps:
                losses.append(loss())
    except NonFiniteError:
        losses.append(inf)
    return [value if np.isfinite(value) else inf for value in losses]


def _worth(loss: float, course: Sequence[float]) -> float:
    """Return the fraction of the base branch after which it had this loss. `course`: its losses at equal intervals."""
    falling = np.minimum.accumulate(course)
    return float(np.interp(-loss, -falling, np.linspace(0, 1, len(falling)))) if np.isfinite(loss) else 0.0


def _fit(efficiencies: Sequence[float], factors: Sequence[int]) -> float:
    """Return the critical batch in base batches; inf if no branch is less efficient than the first."""
    if min(efficiencies) >= 1:
        return inf
    predicted = (_CANDIDATES[:, None] + 1) / (_CANDIDATES[:, None] + np.asarray(factors, np.float64))
    return float(_CANDIDATES[((predicted - np.asarray(efficiencies)) ** 2).sum(1).argmin()])


def _check(program: Program, base: int, examples: Any, factors: Any, hyperparameters: Any) -> tuple[int, list[int]]:
    """Check the arguments, and return `examples` rounded down to whole steps of all branches, and the factors."""
    where = f"measure_critical_batch{at(current_line())}"
    ks = [whole(k) or 0 for k in factors]
    if len(ks) < 2 or ks[0] != 1 or any(after <= k for k, after in pairwise(ks)):
        raise DriverError(f"{where}: factors ascend from 1, such as (1, 2, 4, 8); got {factors!r}.")
    unit, number = base * lcm(*ks), whole(examples) or 0
    if number < max(unit, POINTS * base):
        raise DriverError(
            f"{where}: examples must be at least {max(unit, POINTS * base)}: whole steps of {base} examples and of "
            f"{', '.join(map(str, ks[1:]))} times as many, and {POINTS} of the smallest; got {examples!r}."
        )
    if hyperparameters is None and not program.reads_global_batch:
        raise DriverError(
            f"{where}: the driver's learning rate does not follow the batch. Use ctrl.scale_adamw or "
            "ctrl.scale_by_batch in the driver, or set hyperparameters in each branch, for Adam for instance:\n"
            f"    ctrl.measure_critical_batch(…, hyperparameters=lambda k: {{'lr': 3e-4 * k**0.5}})"
        )
    return number // unit * unit, ks
