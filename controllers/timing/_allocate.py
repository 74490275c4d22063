"""The optimal split of a batch, which minimizes the time of the slowest worker.

    min over b of  max_i t_i(b_i)      with  sum_i b_i = B,  lower_i <= b_i <= upper_i,  b_i integer

for step times t_i that do not decrease with the batch. Unit k of worker i costs t_i(k). As costs do not decrease along
a worker, taking the cheapest unit repeatedly is optimal, also from any start whose units cost no more than the last
unit taken. Water-filling for real-valued sizes finds such a start with less than n units missing, in O(n log n).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from adaptive import BatchSizeError

from ._batch_time import BatchTime


def allocate(
    global_batch: int,
    models: BatchTime,
    lower: ArrayLike,
    upper: ArrayLike,
    quantum: int = 1,
    near: ArrayLike | None = None,
) -> np.ndarray:
    """Return the split of a global batch that minimizes the time of the slowest worker. Exact.

    Args:
      global_batch: number of examples.
      models: the workers' step times.
      lower, upper: bounds of each worker's examples; shape=(n,), or one number for all.
      quantum: sizes are multiples of this, except for one worker that gets the remainder. Halved until the bounds can
        be satisfied.
      near: shape=(n,). Of several optimal splits, the result is the one that is closest to proportional to `near`.

    Returns:
      int64, shape=(n,), summing to `global_batch`.

    Raises:
      BatchSizeError: no split satisfies the bounds, or the times are not finite or decrease with the batch.

    Example:
      Four GPUs of Table 2 of LBB (J. Supercomputing, 2024), milliseconds:

      >>> import controllers as ctrl
      >>> times = ctrl.timing.BatchTime((0.5931, 0.5808, 0.6023, 2.6714), (5.896, 7.152, 8.291, 50.982))
      >>> ctrl.timing.allocate(512, times, lower=1, upper=512).tolist()
      [166, 167, 159, 20]
    """
    n = max(np.size(part) for part in (*models, lower, upper))
    times = BatchTime(*(np.broadcast_to(np.asarray(part, np.float64), n) for part in models))
    if not (np.isfinite(times).all() and times.slope.min() >= 0):
        raise BatchSizeError(f"allocate: step times must be finite and must not decrease with the batch; got {models}.")
    lo, hi = (np.broadcast_to(np.asarray(bound, np.int64), n) for bound in (lower, upper))
    if not _feasible(global_batch, lo, hi):
        raise BatchSizeError(
            f"a global batch of {global_batch} cannot be split over {n} workers that take at least {lo.sum()} and at "
            f"most {hi.sum()} examples together (at least {_brief(lo)}, at most {_brief(hi)})."
        )
    nearest = None if near is None else np.broadcast_to(np.asarray(near, np.float64), n)
    q = max(1, int(quantum))
    while q > 1:
        units, rest = divmod(global_batch, q)
        lo_units, hi_units = -(-lo // q), hi // q
        if _feasible(units, lo_units, hi_units):
            sizes = q * _optimal(units, times._replace(slope=q * times.slope), lo_units, hi_units, nearest)
            room = sizes + rest <= hi
            if room.any():  # the remainder goes to the worker that it delays least
                sizes[np.argmin(np.where(room, times(sizes + rest), np.inf))] += rest
                return sizes
        q //= 2
    return _optimal(global_batch, times, lo, hi, nearest)


def _feasible(total: int, lo: np.ndarray, hi: np.ndarray) -> bool:
    return bool((lo <= hi).all() and lo.sum() <= total <= hi.sum())


def _optimal(total: int, times: BatchTime, lo: np.ndarray, hi: np.ndarray, near: np.ndarray | None) -> np.ndarray:
    """Return an optimal split of a feasible problem; with `near`, the one with the least tau, b_i <= tau * near_i."""
    sizes = fill(total, times, lo, hi)
    if near is None:
        return sizes
    tops = _within(float(times(sizes).max()), times, lo, hi)
    return fill(total, BatchTime(1.0 / np.maximum(near, 1e-3), *np.zeros((2, len(near)))), lo, tops)


def fill(total: int, times: BatchTime, lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """Return the exact split of a feasible problem: water-filling, then the few units that rounding down has left."""
    sizes = _within(water_level(total, times, lo, hi), times, lo, hi)
    missing = total - int(sizes.sum())
    _give(sizes, missing, times, hi)
    _take(sizes, -missing, times, lo)
    return sizes


def water_level(total: int, times: BatchTime, lo: np.ndarray, hi: np.ndarray) -> float:
    """Return the time in which the workers could process `total` examples if sizes were real numbers.

    The examples that a worker can process in a time are `lo` up to t(lo), jump to the end of the constant part, and
    grow linearly up to `hi`. Their sum over workers is piecewise linear with up to 2n kinks.
    """
    slope, intercept, _ = times
    starts, ends = times(lo), slope * hi + intercept
    flat = (slope <= 0) | (ends <= starts)  # all of lo … hi takes one time
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.where(flat, 0.0, 1.0 / slope)
        knees = np.where(flat, hi, np.maximum((starts - intercept) / slope, lo))  # where the line leaves the floor
    kinks = np.concatenate([starts, np.where(flat, starts, ends)])
    order = np.argsort(kinks, kind="stable")
    kinks = kinks[order]
    jumps = np.concatenate([knees - lo, np.zeros(len(lo))])[order]
    rates = np.cumsum(np.concatenate([rate, -rate])[order])
    filled = np.cumsum(jumps) + lo.sum()
    filled[1:] += np.cumsum(rates[:-1] * np.diff(kinks))
    k = min(int(np.searchsorted(filled, total)), len(kinks) - 1)
    if k == 0 or total >= filled[k] - jumps[k] or rates[k - 1] <= 0:
        return float(kinks[k])
    return float(kinks[k - 1] + (total - filled[k - 1]) / rates[k - 1])


def _within(seconds: float, times: BatchTime, lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """Return the most examples, from `lo` to `hi`, that each worker can process in `seconds`; at least `lo`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        reached = np.floor((seconds - times.intercept) / times.slope)
    reached = np.where(times.slope <= 0, hi, np.clip(reached, lo, hi))
    sizes = np.where(times(lo) > seconds, lo, reached).astype(np.int64)
    # The quotient may have a rounding error in either direction.
    sizes += (sizes < hi) & (times(sizes + 1) <= seconds)
    sizes -= (sizes > lo) & (times(sizes) > seconds)
    return sizes


def _give(sizes: np.ndarray, count: int, times: BatchTime, hi: np.ndarray) -> None:
    """Add `count` units in place, each to the worker with the shortest resulting time; of equal ones, to the first."""
    costs = np.where(sizes < hi, times(sizes + 1), np.inf)
    for _ in range(count):
        i = int(np.argmin(costs))
        sizes[i] += 1
        line = times.slope[i] * (sizes[i] + 1) + times.intercept[i]
        costs[i] = max(times.floor[i], line) if sizes[i] < hi[i] else np.inf


def _take(sizes: np.ndarray, count: int, times: BatchTime, lo: np.ndarray) -> None:
    """Remove `count` units in place, the most expensive first; units of equal cost on a floor are removed at once."""
    while count > 0:
        costs = np.where(sizes > lo, times(sizes), -np.inf)
        i = int(np.argmax(costs))
        on_floor = costs[i] <= times.floor[i] or times.slope[i] <= 0
        bulk = min(count, int(sizes[i] - lo[i])) if on_floor else 1
        sizes[i] -= bulk
        count -= bulk


def _brief(values: np.ndarray) -> str:
    distinct = sorted(set(values.tolist()))
    return f"{distinct[0]} each" if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]}"
