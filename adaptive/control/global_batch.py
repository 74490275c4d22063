"""The global batches that workers can have: valid numbers, their quantum, and words for a number that was changed."""

from __future__ import annotations

from typing import Any

from adaptive.base.decision import Limits
from adaptive.base.errors import BatchSizeError
from adaptive.base.values.numbers import whole


def checked_global_batch(global_batch: Any, limits: Limits) -> int:
    """Return a valid global batch for the active workers of `limits`.

    Raises:
      BatchSizeError: the number is invalid, or not possible for these workers.
    """
    number, n, unit = whole(global_batch), len(limits.active), limits.multiple
    if number is None:
        raise BatchSizeError(f"global_batch must be a whole number of examples; got {global_batch!r}.")
    if number < limits.least:
        raise BatchSizeError(
            f"global_batch={number!r} is too small for {n} workers: each takes at least "
            f"{'one example' if unit == 1 else f'{unit} examples'} per step, except those with a share of 0."
            if number > 0
            else f"global_batch must be positive; got {number!r}."
        )
    if number > limits.examples:
        raise BatchSizeError(
            f"global_batch={number!r} is larger than the data set, which has {limits.examples} examples."
        )
    if number % unit:
        below = number // unit * unit
        raise BatchSizeError(
            f"global_batch={number} is not a multiple of {unit}, which the driver's minibatches or its worker's "
            f"mesh require of every local batch. The nearest are {below} and {below + unit}."
        )
    if number > limits.most:
        raise BatchSizeError(f"global_batch={number} is more than the maximum of the {n} workers, {sum(limits.upper)}.")
    return number


def changed_to(total: int, limits: Limits) -> str:
    """Return how a requested global batch became `total`, for a note."""
    if total == limits.most:
        by_data = limits.examples < sum(limits.upper)
        return f"clipped to {total}, {'the size of the data set' if by_data else 'the maximum of these workers'}"
    if total == limits.least:
        return f"clipped to {total}, the minimum for {len(limits.active)} workers"
    return f"rounded to {total}, a multiple of {limits.multiple}"


def auto_quantum(global_batch: int, n_workers: int, multiple: int = 1) -> int:
    """Return a power of two of about a sixteenth of a worker's batch, times `multiple`.

    Rounding sizes to it changes them by at most 3 %, and each size then needs few microbatches.
    """
    return multiple << max(0, (global_batch // multiple // n_workers // 16).bit_length() - 1)
