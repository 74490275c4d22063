"""Find the intervals of a run in which a series was high, by change points, so that noise alone yields none.

A series is cut into segments of constant level by least squares with a price per cut: the optimal partition (Jackson
et al. 2005, "An algorithm for optimal partitioning of data on an interval"). The values are medians of five steps, or
of bins in a long run, so a single long step yields no interval. The price per cut is 3 s² log(n), where s² is the noise
between consecutive steps. Schwarz's criterion has 2 s² log(n); ours is higher because neighboring steps are correlated.
A level counts as high if it exceeds the threshold and four standard errors of its mean.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

SHORTEST = 5  # least number of steps of an interval
_BINS = 400  # largest number of values to partition; the cost grows with its square
_PRICE = 3.0  # per cut, in units of s² log(n)
_ALIKE = 2.0  # neighboring intervals are merged if the ratio of their levels is less
_CERTAIN = 4.0  # standard errors by which the level of an interval exceeds zero
_LEAST_NOISE = 0.2  # lower bound of the noise, as a share of the threshold: finer differences do not matter


class Interval(NamedTuple):
    """The rows `first` to `end - 1`; `level` is the typical value of the series there."""

    first: int
    end: int
    level: float


def intervals(series: np.ndarray, threshold: float) -> list[Interval]:
    """Return the intervals in which a series was high.

    Args:
      series: a value per step; shape=(T,). NaN counts as 0.
      threshold: the least level that counts as high.

    Returns:
      Intervals of at least `SHORTEST` steps, in order.
    """
    series = np.nan_to_num(np.asarray(series, np.float64))
    if len(series) < SHORTEST:
        return []
    width = 1 if len(series) <= _BINS else max(SHORTEST, -(-len(series) // _BINS))
    values = _running_median(series) if width == 1 else _binned_median(series, width)
    if not (values >= 0.7 * threshold).any():
        return []
    noise = _noise(series if width == 1 else values)
    cuts = _partition(values, _PRICE * max(noise, _LEAST_NOISE * threshold) ** 2 * np.log(len(values)))
    found: list[Interval] = []
    for begin, stop in pairwise(cuts):
        level = float(values[begin:stop].mean())
        if level < max(threshold, _CERTAIN * noise / np.sqrt(stop - begin)):
            continue
        last = found[-1] if found else None
        if last and last.end == begin and max(level, last.level) < _ALIKE * min(level, last.level):
            level = (last.level * (last.end - last.first) + level * (stop - begin)) / (stop - last.first)
            found[-1] = Interval(last.first, stop, level)
        else:
            found.append(Interval(begin, stop, level))
    rows = [_refined(series, interval, width) if width > 1 else interval for interval in found]
    return [interval for interval in rows if interval.end - interval.first >= SHORTEST]


def _running_median(series: np.ndarray) -> np.ndarray:
    half = SHORTEST // 2
    padded = np.pad(series, half, mode="reflect")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, SHORTEST), axis=1)


def _binned_median(series: np.ndarray, width: int) -> np.ndarray:
    whole = len(series) // width * width
    medians = np.median(series[:whole].reshape(-1, width), axis=1)
    return medians if whole == len(series) else np.append(medians, np.median(series[whole:]))


def _noise(values: np.ndarray) -> float:
    """Return the standard deviation of the noise, from differences of consecutive values."""
    return 1.4826 * float(np.median(np.abs(np.diff(values)))) / np.sqrt(2) if len(values) > 1 else 0.0


def _partition(values: np.ndarray, price: float) -> list[int]:
    """Return the cuts of least squares plus price; the first is 0, the last the number of values."""
    count = len(values)
    sums, squares = (np.concatenate([[0.0], np.cumsum(v)]) for v in (values, values**2))
    cost = np.empty(count + 1)  # cost[i]: of the best partition of the first i values
    cost[0] = -price
    came_from = np.zeros(count + 1, int)
    for stop in range(1, count + 1):
        begins = np.arange(stop)
        error = squares[stop] - squares[:stop] - (sums[stop] - sums[:stop]) ** 2 / (stop - begins)
        total = cost[:stop] + error + price
        came_from[stop] = best = int(total.argmin())
        cost[stop] = total[best]
    cuts = [count]
    while cuts[-1]:
        cuts.append(int(came_from[cuts[-1]]))
    return cuts[::-1]


def _refined(series: np.ndarray, interval: Interval, width: int) -> Interval:
    """Refine the ends of an interval from bins to rows: to the row that separates the two levels best."""
    first = _parting(series, interval.first * width, width)
    end = len(series) - _parting(series[::-1], len(series) - min(interval.end * width, len(series)), width)
    return Interval(first, max(end, first), interval.level)


def _parting(series: np.ndarray, around: int, width: int) -> int:
    """Return the row at which a series changes from one level to another."""
    if around <= 0:
        return 0
    begin, stop = max(around - width, 0), min(around + width, len(series))
    before = np.median(series[max(begin - width, 0) : begin]) if begin else series[0]
    behind = np.median(series[stop : stop + width]) if stop < len(series) else series[-1]
    middle = (before + behind) / 2
    higher = np.where(series[begin:stop] > middle, 1.0, -1.0) * (1.0 if behind > before else -1.0)
    return begin + int(np.concatenate([[0.0], np.cumsum(higher)]).argmin())
