"""The optimal split of a batch, which minimizes the time of the slowest worker.

    min over b of  max_i t_i(b_i)      with  sum_i b_i = B,  lower_i <= b_i <= upper_i,  b_i integer

for step times t_i that do not decrease with the batch. Regard each unit k of worker i, lower_i < k <= upper_i, as an
item of cost t_i(k). A split selects B - sum(lower) items, a prefix of each worker's items. As costs do not decrease
along a worker, the cheapest B - sum(lower) items form prefixes, so taking the cheapest unit repeatedly is optimal. The
result is also optimal from any start whose units cost no more than the last unit taken. Water-filling for real-valued
sizes finds such a start with less than n units missing, in O(n log n), independent of B.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from adaptive import BatchSizeError

from ._batch_time import FEW, BatchTime

_ROUNDS = 16  # units of one worker that are compared at once

Curve = Callable[[int], float]


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
      near: shape=(n,). Selects among several optimal splits, which are common if times do not depend on the batch: the
        result is as close to proportional to `near` as the bounds and the optimal time permit.

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
    slope, intercept, floor = (np.broadcast_to(np.asarray(part, np.float64), n) for part in models)
    times = BatchTime(slope, intercept, floor)
    if not (all(np.isfinite(part).all() for part in times) and slope.min() >= 0):
        raise BatchSizeError(f"allocate: step times must be finite and must not decrease with the batch; got {models}.")
    lo, hi = _check_bounds(global_batch, lower, upper, n)

    def solve(units: int, lo: np.ndarray, hi: np.ndarray, q: int) -> np.ndarray:
        in_units = times if q == 1 else BatchTime(slope * q, intercept, floor)
        sizes = fill(units, in_units, lo, hi)
        if near is None:
            return sizes
        return _towards(np.broadcast_to(np.asarray(near, np.float64), n), units, in_units, sizes, lo, hi)

    return _in_units(global_batch, lo, hi, quantum, solve, times.__call__)


def allocate_curves(
    global_batch: int, curves: Sequence[Curve], lower: ArrayLike, upper: ArrayLike, quantum: int = 1
) -> np.ndarray:
    """Return the optimal split as `allocate` does, for any step times that do not decrease with the batch. Exact.

    Args:
      global_batch: number of examples.
      curves: for each worker, a function from a number of examples to seconds; see `tabulated` for measured times.
      lower, upper, quantum: as for `allocate`.

    Returns:
      int64, shape=(n,), summing to `global_batch`.

    Raises:
      BatchSizeError: no split satisfies the bounds.
    """
    n = len(curves)
    lo, hi = _check_bounds(global_batch, lower, upper, n)

    def solve(units: int, lo: np.ndarray, hi: np.ndarray, q: int) -> np.ndarray:
        in_units = curves if q == 1 else [lambda k, curve=curve: curve(k * q) for curve in curves]
        return _fill_curves(units, in_units, lo.tolist(), hi.tolist())

    def times(sizes: np.ndarray) -> np.ndarray:
        return np.array([curve(size) for curve, size in zip(curves, sizes.tolist(), strict=True)])

    return _in_units(global_batch, lo, hi, quantum, solve, times)


def tabulated(sizes: Sequence[int], seconds: Sequence[float]) -> Curve:
    """Return a curve through measured points: linear between them, constant before the first, extrapolated at the end.

    Args:
      sizes: numbers of examples, ascending.
      seconds: measured times. If a larger size took less time, which is noise, the longer time is used for it too.

    Raises:
      ValueError: the sizes do not ascend, or there is not one finite time for each.
    """
    xs = [int(b) for b in sizes]
    ys = np.maximum.accumulate(np.asarray(seconds, np.float64)).tolist()
    if not xs or len(xs) != len(ys) or any(a >= b for a, b in itertools.pairwise(xs)) or not np.isfinite(ys).all():
        raise ValueError(f"tabulated: sizes must ascend, with one finite time each; got {sizes} and {seconds}.")

    def curve(size: int) -> float:
        if size <= xs[0] or len(xs) == 1:
            return ys[0]
        k = min(bisect_right(xs, size), len(xs) - 1)
        return ys[k - 1] + (ys[k] - ys[k - 1]) * (size - xs[k - 1]) / (xs[k] - xs[k - 1])

    return curve


# --- units of a quantum -----------------------------------------------------------------------------------------------


def _check_bounds(global_batch: int, lower: ArrayLike, upper: ArrayLike, n: int) -> tuple[np.ndarray, np.ndarray]:
    lo = np.broadcast_to(np.asarray(lower, np.int64), n)
    hi = np.broadcast_to(np.asarray(upper, np.int64), n)
    if (lo > hi).any() or not lo.sum() <= global_batch <= hi.sum():
        raise BatchSizeError(
            f"a global batch of {global_batch} cannot be split over {n} workers that take at least {lo.sum()} and at "
            f"most {hi.sum()} examples together (at least {_brief(lo)}, at most {_brief(hi)})."
        )
    return lo, hi


def _in_units(
    global_batch: int,
    lo: np.ndarray,
    hi: np.ndarray,
    quantum: int,
    solve: Callable[[int, np.ndarray, np.ndarray, int], np.ndarray],
    times: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Solve in units of the quantum; the remainder of the batch goes to the worker that it delays least."""
    q = max(1, int(quantum))
    while q > 1:
        units, rest = divmod(global_batch, q)
        lo_units, hi_units = -(-lo // q), hi // q
        if (lo_units <= hi_units).all() and lo_units.sum() <= units <= hi_units.sum():
            sizes = solve(units, lo_units, hi_units, q) * q
            room = sizes + rest <= hi
            if rest == 0:
                return sizes
            if room.any():
                sizes[np.argmin(np.where(room, times(sizes + rest), np.inf))] += rest
                return sizes
        q //= 2
    return solve(global_batch, lo, hi, 1)


# --- lines with a floor -----------------------------------------------------------------------------------------------


def fill(total: int, times: BatchTime, lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """Return the exact split of a feasible problem: water-filling, then the few units that rounding down has left."""
    level = water_level(total, times, lo, hi)
    sizes = _within(level, times, lo, hi)
    missing = total - int(sizes.sum())
    if missing > 0:
        _give(sizes, missing, times, hi)
    elif missing < 0:
        _take(sizes, -missing, times, lo)
    return sizes


def level_of_lines(total: int, times: BatchTime) -> float:
    """Return a lower bound of the time of any split, without regard to bounds and floors.

    It is the mean of all lines weighted by speed, which is the same for all splits; bounds and floors can only make a
    step longer. Costs a tenth of `water_level`.
    """
    rate = 1 / np.maximum(times.slope, 1e-30)
    return float((total + (rate * times.intercept).sum()) / rate.sum())


def water_level(total: int, times: BatchTime, lo: np.ndarray, hi: np.ndarray) -> float:
    """Return the time in which the workers could process `total` examples if sizes were real numbers.

    The number of examples that a worker can process in a given time is `lo` up to t(lo), then jumps to the end of the
    constant part, and then grows linearly up to `hi`. Summed over workers it is piecewise linear with up to 2n kinks.
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
    # The quotient may have a rounding error in either direction. The proof of exactness relies on the comparison of
    # costs, so correct the sizes by the same comparison.
    sizes += (sizes < hi) & (times(sizes + 1) <= seconds)
    sizes -= (sizes > lo) & (times(sizes) > seconds)
    return sizes


def _give(sizes: np.ndarray, count: int, times: BatchTime, hi: np.ndarray) -> None:
    """Add `count` units in place, each to the worker with the shortest resulting time; of equal ones, to the first."""
    if len(sizes) > FEW and count <= len(sizes):
        more = _cheapest(sizes, count, times, hi)
        if more is not None:
            sizes += more
            return
    costs, slopes, tops = times(sizes + 1).tolist(), times.slope.tolist(), hi.tolist()
    intercepts, floors = times.intercept.tolist(), times.floor.tolist()
    grown = sizes.tolist()
    heap = [(cost, i) for i, cost in enumerate(costs) if grown[i] < tops[i]]
    heapq.heapify(heap)
    for _ in range(count):
        i = heap[0][1]
        size = grown[i] = grown[i] + 1
        if size < tops[i]:
            heapq.heapreplace(heap, (max(floors[i], slopes[i] * (size + 1) + intercepts[i]), i))
        else:
            heapq.heappop(heap)
    sizes[:] = grown


def _cheapest(sizes: np.ndarray, count: int, times: BatchTime, hi: np.ndarray) -> np.ndarray | None:
    """Return how many of the `count` cheapest further units belong to each worker; `None` if there are too many of one
    cost to compare them all.
    """
    every = np.arange(len(sizes))
    costs = np.where(sizes < hi, times(sizes + 1), np.inf)
    most = np.partition(costs, count - 1)[count - 1]  # no unit that costs more is among the cheapest
    workers, found = every[costs <= most], [(costs[costs <= most], every[costs <= most])]
    for further in range(2, _ROUNDS + 2):
        workers = workers[sizes[workers] + further <= hi[workers]]
        line = BatchTime(*(np.broadcast_to(part, len(sizes))[workers] for part in times))
        costs = line(sizes[workers] + further)
        workers, costs = workers[costs <= most], costs[costs <= most]
        if not len(workers):
            break
        found.append((costs, workers))
    else:
        return None
    if most == np.inf:
        return None
    each, whose = (np.concatenate(part) for part in zip(*found, strict=True))
    return np.bincount(whose[np.lexsort((whose, each))[:count]], minlength=len(sizes))


def _take(sizes: np.ndarray, count: int, times: BatchTime, lo: np.ndarray) -> None:
    """Remove `count` units in place, the most expensive first; units of equal cost on a floor are removed at once."""
    while count > 0:
        costs = np.where(sizes > lo, times(sizes), -np.inf)
        i = int(np.argmax(costs))
        on_floor = costs[i] <= times.floor[i] or times.slope[i] <= 0
        bulk = min(count, int(sizes[i] - lo[i])) if on_floor else 1
        sizes[i] -= bulk
        count -= bulk


def _towards(
    near: np.ndarray, total: int, times: BatchTime, sizes: np.ndarray, lo: np.ndarray, hi: np.ndarray
) -> np.ndarray:
    """Return the split most proportional to `near` among those that take no longer than `sizes`.

    This is the same problem again: the least `tau` with b_i <= tau * near_i, with upper bounds given by the time.
    """
    tops = _within(float(times(sizes).max()), times, lo, hi)
    slope = 1.0 / np.maximum(near, 1e-3)
    return fill(total, BatchTime(slope, np.zeros_like(slope), np.zeros_like(slope)), lo, tops)


# --- any curves -------------------------------------------------------------------------------------------------------


def _fill_curves(total: int, curves: Sequence[Curve], lo: list[int], hi: list[int]) -> np.ndarray:
    """Bisect the time until few units are missing, then add the cheapest units, those of equal cost at once."""

    def within(seconds: float) -> list[int]:
        return [_reach(curve, seconds, a, b) for curve, a, b in zip(curves, lo, hi, strict=True)]

    early = min(curve(a) for curve, a in zip(curves, lo, strict=True))
    late = max(curve(b) for curve, b in zip(curves, hi, strict=True))
    sizes = list(lo)
    while total - sum(sizes) > len(curves):
        middle = 0.5 * (early + late)
        if not early < middle < late:  # no time in between: all missing units cost the same
            break
        reached = within(middle)
        if sum(reached) <= total:
            early, sizes = middle, reached
        else:
            late = middle
    missing = total - sum(sizes)
    heap = [(curve(b + 1), i) for i, (curve, b) in enumerate(zip(curves, sizes, strict=True)) if b < hi[i]]
    heapq.heapify(heap)
    while missing > 0:
        cost, i = heap[0]
        bulk = min(missing, max(1, _reach(curves[i], cost, sizes[i], hi[i]) - sizes[i]))
        sizes[i] += bulk
        missing -= bulk
        if sizes[i] < hi[i]:
            heapq.heapreplace(heap, (curves[i](sizes[i] + 1), i))
        else:
            heapq.heappop(heap)
    return np.array(sizes, np.int64)


def _reach(curve: Curve, seconds: float, lo: int, hi: int) -> int:
    """Return the most examples, from `lo` to `hi`, processed in these seconds; at least `lo`."""
    return lo + bisect_right(range(lo + 1, hi + 1), seconds, key=curve)


def _brief(values: np.ndarray) -> str:
    distinct = sorted(set(values.tolist()))
    return f"{distinct[0]} each" if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]}"
