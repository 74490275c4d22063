"""Splitting a global batch over the workers by shares."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from adaptive.base.decision import Limits
from adaptive.base.errors import BatchSizeError
from adaptive.base.values.numbers import reals, whole


def split(global_batch: int, shares: Sequence[float] | np.ndarray, limits: Limits) -> tuple[int, ...]:
    """Return integer batch sizes in proportion to `shares` that sum to `global_batch` and respect the limits.

    A share of 0 gives no examples; a positive one at least `limits.lower`. Shares that already are such sizes are
    returned unchanged. Otherwise sizes are rounded to multiples of `limits.quantum` by largest remainder; the rest of
    the global batch goes to the largest share. Sizes are always multiples of `limits.multiple`.

    Args:
      global_batch: examples over all workers; a multiple of `limits.multiple`.
      shares: relative weights, one per worker, not negative, not all zero.
      limits: bounds per worker, and the quantum.

    Raises:
      BatchSizeError: the shares are invalid, or no split respects the limits.
    """
    weight = check_shares(shares, len(limits.lower))
    limits = limits.of(weight > 0)
    unit = limits.multiple
    if global_batch % unit:
        raise BatchSizeError(f"a global batch of {global_batch} is not a multiple of {unit}, as all batches must be.")
    lower, upper = -(-limits.arrays.lower // unit) * unit, limits.arrays.upper // unit * unit
    weight = np.where(upper > 0, weight, 0.0)
    if not lower.sum() <= global_batch <= upper.sum():
        raise BatchSizeError(
            f"a global batch of {global_batch} cannot be split over {len(limits.active)} workers that take at least "
            f"{lower.sum()} and at most {upper.sum()} examples together."
        )
    weight = weight / weight.max() * global_batch if weight.max() > global_batch else weight  # keeps sums in range
    if weight.sum() == global_batch and ((weight % unit == 0) & (weight >= lower) & (weight <= upper)).all():
        return tuple(weight.astype(int).tolist())
    units, lower, upper = global_batch // unit, lower // unit, upper // unit
    ideal = _proportional(units, weight / weight.sum(), lower, upper)
    return tuple((unit * _round(units, ideal, lower, upper, max(1, limits.quantum // unit))).tolist())


def check_shares(shares: Any, n_workers: int) -> np.ndarray:
    """Return shares as an array of floats; shape=(n_workers,). Raises a BatchSizeError unless they are one finite
    number per worker, none negative and not all zero.
    """
    weight = reals(shares)
    if weight is None:
        raise BatchSizeError(f"shares are numbers, one per worker, {n_workers} of them; got {shares!r}.")
    if weight.shape != (n_workers,):
        raise BatchSizeError(f"shares must be one number per worker, {n_workers} of them; got shape {weight.shape}.")
    for wrong, what in ((np.isnan(weight), "NaN"), (np.isinf(weight), "infinite"), (weight < 0, "negative")):
        if wrong.any():
            raise BatchSizeError(
                f"shares must be finite and not negative; got {reprlib.repr(weight.tolist())}: the share of worker "
                f"{', '.join(map(str, np.flatnonzero(wrong)))} is {what}."
            )
    if not weight.any():
        raise BatchSizeError("shares are all zero; at least one worker must take examples.")
    return weight + 0.0  # no negative zeros: processes compare requests as text


def positive(name: str, value: Any) -> int:
    """Return a user's number of examples, argument `name`, as an integer, or raise a BatchSizeError."""
    number = whole(value)
    if number is None or number < 1:
        raise BatchSizeError(f"{name} must be positive, a whole number of examples; got {value!r}.")
    return number


def most_of_each(max_local_batch: Any, n_workers: int) -> list[int]:
    """Return each worker's largest local batch, of one number for all or one for each, else raise a BatchSizeError."""
    if whole(max_local_batch) is not None:
        return [positive("max_local_batch", max_local_batch)] * n_workers
    array = reals(max_local_batch)
    if array is None or array.shape != (n_workers,):
        raise BatchSizeError(
            f"max_local_batch is one whole number of examples, or one for each of {n_workers} workers, or 'auto'; "
            f"got {max_local_batch!r}."
        )
    return [positive("max_local_batch", most) for most in max_local_batch]


def _proportional(total: int, share: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Return real sizes `clip(level * share, lower, upper)` that sum to `total`."""
    sizes = total * share
    if (sizes >= lower).all() and (sizes <= upper).all():
        return sizes
    # The sum is piecewise linear in the level, with kinks where a worker leaves its lower bound or reaches its upper.
    some = share > 1e-15  # smaller shares count as 0, to avoid a division by it
    leaves, comes = lower[some] / share[some], upper[some] / share[some]
    kinks = np.concatenate([leaves, comes])
    order = np.argsort(kinks)
    rates = np.cumsum(np.concatenate([share[some], -share[some]])[order])
    kinks = kinks[order]
    sums = lower.sum() + np.concatenate([[0.0], np.cumsum(rates[:-1] * np.diff(kinks))])
    sizes = np.clip(np.interp(total, sums, kinks) * share, lower, upper)
    missing = total - sizes.sum()
    if missing > 0.5:  # all others are at their upper bounds: workers without a share take the rest
        room = upper - sizes
        sizes = sizes + room * (missing / room.sum())
    return sizes


def _round(total: int, ideal: np.ndarray, lower: np.ndarray, upper: np.ndarray, quantum: int) -> np.ndarray:
    sizes = np.clip((ideal + 1e-6) // quantum * quantum, lower, upper).astype(int)
    while (left := total - int(sizes.sum())) != 0:
        step = min(quantum, abs(left)) * (1 if left > 0 else -1)
        fits = (sizes + step >= lower) & (sizes + step <= upper)
        if not fits.any():  # no worker has room for a quantum: continue in single units
            step = 1 if left > 0 else -1
            fits = (sizes + step >= lower) & (sizes + step <= upper)
        # A remainder smaller than a quantum goes to the largest size, where it changes least.
        need = (ideal - sizes) * np.sign(step) if abs(step) == quantum else ideal
        neediest = np.argsort(np.where(fits, -need, np.inf), kind="stable")
        sizes[neediest[: min(left // step, int(np.count_nonzero(fits)))]] += step
    return sizes


def equal(global_batch: int, limits: Limits) -> tuple[int, ...]:
    """Return sizes as equal as integers can be, over the active workers."""
    return split(global_batch, [1.0] * len(limits.lower), limits._replace(quantum=1))
