"""`noise_batch`: a global batch that follows the gradient noise scale."""

from __future__ import annotations

from adaptive.base.decision import Decision, Observation
from controllers._policy import Policy

from .efficiency import Bounds, check_noise, efficiency_cap, read_noise, round_batch


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
    least_efficiency: float | None = None,
    base_batch: int | None = None,
) -> Policy:
    """Return a policy that makes the global batch follow the noise scale, which balances few examples and few steps.

    The batch grows to the scale's *lower* confidence bound and shrinks to its upper bound. Between the two bounds it
    does not change. Requests nothing while the scale is unknown: NaN, or with a `signal` that is not positive.

        noise = mon.noise_scale(grads, avg_grads)
        ctrl.hook(ctrl.noise_batch(max_batch=4096), noise, every=20)

    Args:
      min_batch, max_batch: bounds; by default those of the workers.
      growth: the largest factor by which one decision changes the batch.
      dead_band: the least relative change.
      monotone: whether the batch never shrinks.
      confident: whether to use the confidence bounds; otherwise the scale itself is used, as in KungFu.
      factor: the scale is multiplied by this.
      multiple: batches are multiples of this; by default of the program's quantum times the active workers.
      least_efficiency: between 0 and 1: lower bound of the statistical efficiency, relative to `base_batch`.
      base_batch: the batch with an efficiency of 1.

    Returns:
      A policy for a hook whose value is a noise scale: an object with fields `scale`, `lower`, `upper` and `signal`, or
      a number. Pass the object: its `scale` alone does not show that there is no signal.

    Raises:
      ValueError: an argument is out of range.

    References:
      Mai et al. 2019, Listing 1; McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", section 2.4.
    """
    if growth <= 1 or dead_band < 0 or factor <= 0 or (multiple is not None and multiple < 1):
        raise ValueError(
            f"noise_batch: growth must be above 1, factor above 0, dead_band not negative and multiple at least 1; "
            f"got {growth}, {factor}, {dead_band} and {multiple}."
        )
    if min_batch is not None and max_batch is not None and not 1 <= min_batch <= max_batch:
        raise ValueError(f"noise_batch: 1 <= min_batch <= max_batch must hold; got {min_batch} and {max_batch}.")
    if (least_efficiency is None) != (base_batch is None) or not 0 < (least_efficiency or 1.0) <= 1:
        raise ValueError(
            f"noise_batch: least_efficiency, from 0 to 1, is relative to a base_batch: give both or neither; "
            f"got {least_efficiency} and {base_batch}."
        )

    def update(observation: Observation, state: tuple[()]) -> tuple[Decision | None, tuple[()]]:
        if not observation.due:
            return None, state
        noise = read_noise(observation.values[0] if observation.values else None, "noise_batch")
        if not noise.known:
            return None, state
        current = observation.global_batch
        lower, upper = (noise.lower, noise.upper) if confident else (noise.scale, noise.scale)
        target = between(current, noise, factor, confident=confident)
        if least_efficiency is not None and base_batch is not None:
            low, high = (efficiency_cap(bound, base_batch, least_efficiency) for bound in (lower, upper))
            target = min(target, max(low, current), high)  # clip again: the present batch may be out of bounds
        if monotone:
            target = max(target, current)
        target = min(max(target, current / growth), current * growth)
        least, most = batch_bounds(observation, min_batch, max_batch)
        batch = round_batch(target, multiple or batch_multiple(observation), least, most)
        if abs(batch - current) <= dead_band * current and least <= current <= most:
            return None, state
        bounds = f"{noise.lower:.4g} to {noise.upper:.4g}"
        note = f"batch {current} to {batch}: the noise scale is {noise.scale:.4g} ({bounds})"
        return Decision(global_batch=batch, notes=(note,)), state

    return Policy(lambda n_workers: (), update, "noise_batch", ("noise_scale",), check_noise)


def between(current: float, noise: Bounds, factor: float, *, confident: bool) -> float:
    """Clip `current` to the confidence bounds of the noise scale times `factor`.

    Args:
      current: the present batch.
      noise: the noise scale.
      factor: the scale is multiplied by this.
      confident: whether to use the confidence bounds; otherwise the result is the scale itself.
    """
    lower, upper = (noise.lower, noise.upper) if confident else (noise.scale, noise.scale)
    return min(max(current, factor * lower), factor * upper)


def batch_bounds(observation: Observation, min_batch: int | None, max_batch: int | None) -> tuple[int, int]:
    """Return a policy's bounds of the global batch, clipped to those of the workers."""
    least, most = sum(observation.limits.lower), sum(observation.limits.upper)
    low = min(max(least, min_batch or least), most)
    return low, max(min(most, max_batch or most), low)


def batch_multiple(observation: Observation) -> int:
    """Return the global batch that is one quantum for each active worker."""
    return observation.limits.quantum * len(observation.limits.active)
