"""`noise_batch` and `noise_workers`: a global batch, or a number of workers, that follows the gradient noise scale.

Both grow to the lower confidence bound of the noise scale, shrink to the upper one, and change nothing between the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from adaptive import DriverError
from adaptive.base.decision import Decision, Observation
from controllers._policy import Policy, stateless
from controllers.timing.seconds import shape_of


def noise_batch(
    *,
    min_batch: int | None = None,
    max_batch: int | None = None,
    growth: float = 2.0,
    dead_band: float = 0.1,
    monotone: bool = False,
    confident: bool = True,
    factor: float = 1.0,
    multiple: int | None = None,
) -> Policy:
    """Return a policy that makes the global batch follow the noise scale, which balances few examples and few steps.

        noise = mon.noise_scale(grads, avg_grads)
        ctrl.hook(ctrl.noise_batch(max_batch=4096), noise, every=20)

    The batch grows to the scale's *lower* confidence bound, shrinks to its upper bound, and does not change between
    the two. Requests nothing while the scale is unknown: NaN, or with a `signal` that is not positive.

    Args:
      min_batch, max_batch: bounds; by default those of the workers.
      growth: the largest factor by which one decision changes the batch.
      dead_band: the least relative change.
      monotone: whether the batch never shrinks.
      confident: whether to use the confidence bounds; otherwise the scale itself is used, as in KungFu.
      factor: the scale is multiplied by this.
      multiple: batches are multiples of this; by default of the program's quantum times the active workers.

    Returns:
      A policy for a hook whose value is a noise scale: an object with fields `scale`, `lower`, `upper` and `signal`, or
      a number. Pass the object: its `scale` alone does not show that there is no signal.

    Raises:
      ValueError: an argument is out of range.

    References:
      Mai et al. 2019, Listing 1; McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", section 2.4.
    """
    if not (growth > 1 and dead_band >= 0 and factor > 0 and (multiple is None or multiple >= 1)):
        raise ValueError(
            f"noise_batch: growth must be above 1, factor above 0, dead_band not negative and multiple at least 1; "
            f"got {growth}, {factor}, {dead_band} and {multiple}."
        )
    check_bounds("noise_batch", "batch", min_batch, max_batch)

    def decide(observation: Observation) -> Decision | None:
        noise, current = read_noise(observation.values[0]), observation.global_batch
        if not noise.known:
            return None
        target = between(current, noise, factor, confident=confident, monotone=monotone)
        target = min(max(target, current / growth), current * growth)
        limits = observation.limits
        least, most = within(min_batch, max_batch, sum(limits.lower), sum(limits.upper))
        batch = round_batch(target, multiple or limits.quantum * len(limits.active), least, most)
        if abs(batch - current) <= dead_band * current and least <= current <= most:
            return None
        return Decision(global_batch=batch, notes=(f"batch {current} to {batch}: {noise}",))

    return stateless(decide, "noise_batch", reads=("noise_scale",), check=check_noise)


def noise_workers(
    examples_per_worker: int,
    *,
    min_workers: int | None = None,
    max_workers: int | None = None,
    growth: float = 2.0,
    dead_band: float = 0.1,
    monotone: bool = False,
    confident: bool = True,
    factor: float = 1.0,
) -> Policy:
    """Return a policy that makes the number of workers follow the noise scale, at a constant batch per worker.

        noise = mon.noise_scale(grads, avg_grads)
        ctrl.hook(ctrl.noise_workers(64), noise, every=20)

    Requests `n = noise / examples_per_worker` workers and a global batch of `n * examples_per_worker`, by the bounds of
    the noise scale as `noise_batch`. When a worker is lost, the batch shrinks with it.

    Args:
      examples_per_worker: the local batch.
      min_workers, max_workers: bounds; by default the available numbers.
      growth: the largest factor by which one decision changes the number of workers; a change by one is always allowed.
      dead_band: the least change relative to the number of workers, in addition to the half worker of rounding.
      monotone, confident, factor: as for `noise_batch`.

    Returns:
      A policy for a hook with a noise scale, as for `noise_batch`.

    Raises:
      ValueError: an argument is out of range.

    References:
      Mai et al. 2019, "Taming hyperparameters in deep learning systems", Listing 1.
    """
    if not examples_per_worker >= 1 or examples_per_worker != int(examples_per_worker):
        raise ValueError(f"noise_workers: examples_per_worker is a whole number, 1 or more; got {examples_per_worker}.")
    if not (growth > 1 and dead_band >= 0 and factor > 0):
        raise ValueError(
            f"noise_workers: growth must be above 1, factor above 0 and dead_band not negative; got {growth}, {factor} "
            f"and {dead_band}."
        )
    check_bounds("noise_workers", "workers", min_workers, max_workers)

    def decide(observation: Observation) -> Decision | None:
        noise = read_noise(observation.values[0])
        if not noise.known:
            return None
        there, current = len(observation.members), observation.target_workers
        wanted = between(current, noise, factor / examples_per_worker, confident=confident, monotone=monotone)
        wanted = within_growth(wanted, there, current, growth)
        least, most = within(min_workers, max_workers, observation.least_workers, observation.most_workers)
        stays = abs(wanted - current) < 0.5 + dead_band * current and least <= current <= most
        n = current if stays else round(min(max(wanted, least), most))
        batch = n * examples_per_worker
        known = n == current and (there != current or observation.global_batch == observation.limits.nearest(batch))
        if known:  # otherwise the batch is already requested, and waits for the workers
            return None
        note = f"workers {current} to {n}, batch {batch}: {noise}"
        return Decision(global_batch=batch, workers=n, notes=(note,))

    return stateless(decide, "noise_workers", reads=("noise_scale",), check=check_noise)


class Bounds(NamedTuple):
    """A noise scale in examples, with its confidence bounds; NaN while not known."""

    scale: float
    lower: float
    upper: float

    @property
    def known(self) -> bool:
        """Whether there are measurements."""
        return self.scale >= 0 and self.lower >= 0 and self.upper >= 0  # False for NaN

    def __str__(self) -> str:
        return f"the noise scale is {self.scale:.4g} ({self.lower:.4g} to {self.upper:.4g})"


def read_noise(value: Any) -> Bounds:
    """Return the bounds of a NoiseScale, or of a number; NaN while the `signal` is not positive."""
    if not float(getattr(value, "signal", 1.0)) > 0:
        return Bounds(math.nan, math.nan, math.nan)
    scale = float(getattr(value, "scale", value))
    return Bounds(scale, float(getattr(value, "lower", scale)), float(getattr(value, "upper", scale)))


def check_noise(values: Sequence[Any], _: int, policy: str) -> None:
    """Check that the hook's first value can be a noise scale; used as policies' `check`. Else raises a DriverError."""
    value = values[0] if values else None
    numbers = [getattr(value, field) for field in Bounds._fields if hasattr(value, field)] or [value]
    if value is None or any(shape_of(x) or isinstance(x, tuple | list | dict) for x in numbers):
        got = f"a {type(value).__name__}" if shape_of(value) == () else f"an array of shape {shape_of(value)}"
        raise DriverError(
            f"{policy} reads a noise scale; it received {'nothing' if value is None else got}. Write:\n"
            f"    noise = mon.noise_scale(grads, avg_grads)\n"
            f"    ctrl.hook(ctrl.{policy}(), noise)"
        )


def round_batch(target: float, multiple: int, least: int, most: int) -> int:
    """Return the multiple between two bounds nearest to `target`; the nearest integer if there is no such multiple."""
    first, last = -(-least // multiple), most // multiple
    if first > last:
        return int(min(max(target, least), most))
    return int(min(max(round(min(target / multiple, last)), first), last)) * multiple


def between(current: float, noise: Bounds, factor: float, *, confident: bool, monotone: bool) -> float:
    """Clip `current` to the bounds of the noise scale times `factor`; to the scale itself if not `confident`."""
    lower, upper = (noise.lower, noise.upper) if confident else (noise.scale, noise.scale)
    return max(min(max(current, factor * lower), factor * upper), current if monotone else 0)


def within(low: int | None, high: int | None, least: int, most: int) -> tuple[int, int]:
    """Return a policy's bounds of the batch or of the number of workers, clipped to the feasible ones."""
    low = min(max(least, low or least), most)
    return low, max(min(most, high or most), low)


def check_bounds(policy: str, what: str, least: int | None, most: int | None) -> None:
    """Check a policy's bounds of the batch or of the number of workers. Raises a ValueError if nothing is between."""
    low = 1 if least is None else least
    if not 1 <= low <= (low if most is None else most):
        raise ValueError(f"{policy}: 1 <= min_{what} <= max_{what} must hold; got {least} and {most}.")


def within_growth(wanted: float, there: int, current: int, growth: float) -> float:
    """Clip a number of workers to within a factor of `growth` of `there`, or by one; `current` is always allowed."""
    fewest = min(current, math.floor(there / growth))
    return min(max(wanted, fewest), max(current, math.ceil(there * growth)))
