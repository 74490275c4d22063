"""`noise_workers`: a number of workers that follows the gradient noise scale, as in KungFu's Listing 1."""

from __future__ import annotations

import math

from adaptive.base.decision import Decision, Observation
from controllers._policy import Policy

from .efficiency import check_noise, read_noise
from .noise_batch import between


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

    Requests `n = noise / examples_per_worker` workers and a global batch of `n * examples_per_worker`. Adds workers by
    the scale's *lower* confidence bound, and removes them by the upper bound; between the two it changes nothing.
    Requests nothing while the scale is unknown (NaN). When a worker is lost, the batch shrinks with it.

    Args:
      examples_per_worker: the local batch.
      min_workers, max_workers: bounds; by default the available numbers.
      growth: the largest factor by which one decision changes the number of workers; a change by one is always allowed.
      dead_band: the least change relative to the number of workers, in addition to the half worker of rounding.
      monotone: whether workers are never removed.
      confident: whether to use the confidence bounds; otherwise the scale itself is used, as in KungFu.
      factor: the scale is multiplied by this.

    Returns:
      A policy for a hook whose value is a noise scale: an object with fields `scale`, `lower` and `upper`, or a number.

    Raises:
      ValueError: an argument is out of range.

    References:
      Mai et al. 2019, "Taming hyperparameters in deep learning systems", Listing 1.
    """
    if not examples_per_worker >= 1 or examples_per_worker != int(examples_per_worker):
        raise ValueError(f"noise_workers: examples_per_worker is a whole number, 1 or more; got {examples_per_worker}.")
    if growth <= 1 or dead_band < 0 or factor <= 0:
        raise ValueError(
            f"noise_workers: growth must be above 1, factor above 0 and dead_band not negative; got {growth}, {factor} "
            f"and {dead_band}."
        )
    check_workers("noise_workers", min_workers, max_workers)

    def update(observation: Observation, state: tuple[()]) -> tuple[Decision | None, tuple[()]]:
        if not observation.due:
            return None, state
        noise = read_noise(observation.values[0] if observation.values else None, "noise_workers")
        if not noise.known:
            return None, state
        there, current = len(observation.members), observation.target_workers
        wanted = between(current, noise, factor / examples_per_worker, confident=confident)
        if monotone:
            wanted = max(wanted, current)
        wanted = within_growth(wanted, there, current, growth)
        least, most = worker_bounds(observation, min_workers, max_workers)
        n = round(min(max(wanted, least), most))
        if abs(wanted - current) < 0.5 + dead_band * current and least <= current <= most:
            n = current
        batch = n * examples_per_worker
        known = n == current and (there != current or observation.global_batch == observation.limits.nearest(batch))
        if known:  # otherwise the batch is already requested, and waits for the workers
            return None, state
        bounds = f"{noise.lower:.4g} to {noise.upper:.4g}"
        note = f"workers {current} to {n}, batch {batch}: the noise scale is {noise.scale:.4g} ({bounds})"
        return Decision(global_batch=batch, workers=n, notes=(note,)), state

    return Policy(lambda n_workers: (), update, "noise_workers", ("noise_scale",), check_noise)


def check_workers(policy: str, min_workers: int | None, max_workers: int | None) -> None:
    """Check a policy's bounds of the number of workers.

    Raises:
      ValueError: no number of workers is between them.
    """
    low = 1 if min_workers is None else min_workers
    if not 1 <= low <= (low if max_workers is None else max_workers):
        raise ValueError(f"{policy}: 1 <= min_workers <= max_workers must hold; got {min_workers} and {max_workers}.")


def worker_bounds(observation: Observation, min_workers: int | None, max_workers: int | None) -> tuple[int, int]:
    """Return a policy's bounds of the number of workers, clipped to the available numbers."""
    least, most = observation.least_workers, observation.most_workers
    low = min(max(least, min_workers or least), most)
    return low, max(min(most, max_workers or most), low)


def within_growth(wanted: float, there: int, current: int, growth: float) -> float:
    """Clip a wanted number of workers to within a factor of `growth` of the present number.

    Args:
      wanted: the number to clip.
      there: the present number of workers.
      current: the number that is already requested, which is always allowed.
      growth: the factor, above 1: one worker more or fewer is always allowed.
    """
    fewest = min(current, math.floor(there / growth))
    return min(max(wanted, fewest), max(current, math.ceil(there * growth)))
