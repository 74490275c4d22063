"""Stretches of a run in which something was high: found by change points, so that noise alone makes none.

A series is cut into segments of one level each by least squares with a price for every cut: the optimal partition,
found exactly (Jackson et al. 2005, "An algorithm for optimal partitioning of data on an interval"). What is cut are
medians, of five steps, or of bins where a run is long; so single steps that took long make no stretch. A price of
3 s² log(n) a cut, s² being the noise from one step to the next, is above Schwarz's 2 s² log(n), since steps beside one
another are not quite independent. And what is high must be so by four times what its mean is uncertain by.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

SHORTEST = 5  # steps
_BINS = 400  # a partition costs their square
_PRICE = 3.0
_ALIKE = 2.0  # levels of which the higher is less than that many times the lower are told as one
_CERTAIN = 4.0  # standard errors
_LEAST_NOISE = 0.2  # of the threshold: what is finer than that is nobody's concern


class Stretch(NamedTuple):
    """Rows from `first` on, and before `end`; `level` is the series' typical one in them."""

    first: int
    end: int
    level: float


def stretches(series: np.ndarray, threshold: float) -> list[Stretch]:
    """Where a series was high for long.

    Args:
      series: a number a step, of which the sign may be noise's; shape=(T,). NaN where there is none, taken as 0.
      threshold: levels from which on it is high.

    Returns:
      Stretches of at least `SHORTEST` steps, in order.
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
    found: list[Stretch] = []
    for begin, stop in pairwise(cuts):
        level = float(values[begin:stop].mean())
        if level < max(threshold, _CERTAIN * noise / np.sqrt(stop - begin)):
            continue
        last = found[-1] if found else None
        if last and last.end == begin and max(level, last.level) < _ALIKE * min(level, last.level):
            level = (last.level * (last.end - last.first) + level * (stop - begin)) / (stop - last.first)
            found[-1] = Stretch(last.first, stop, level)
        else:
            found.append(Stretch(begin, stop, level))
    rows = [_refined(series, stretch, width) if width > 1 else stretch for stretch in found]
    return [stretch for stretch in rows if stretch.end - stretch.first >= SHORTEST]


def _running_median(series: np.ndarray) -> np.ndarray:
    half = SHORTEST // 2
    padded = np.pad(series, half, mode="reflect")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, SHORTEST), axis=1)


def _binned_median(series: np.ndarray, width: int) -> np.ndarray:
    whole = len(series) // width * width
    medians = np.median(series[:whole].reshape(-1, width), axis=1)
    return medians if whole == len(series) else np.append(medians, np.median(series[whole:]))


def _noise(values: np.ndarray) -> float:
    """The standard deviation from one value to the next: of differences, so that levels do not count."""
    return 1.4826 * float(np.median(np.abs(np.diff(values)))) / np.sqrt(2) if len(values) > 1 else 0.0


def _partition(values: np.ndarray, price: float) -> list[int]:
    """The cuts of least squares plus price; the first is 0, the last the number of values."""
    count = len(values)
    sums, squares = (np.concatenate([[0.0], np.cumsum(v)]) for v in (values, values**2))
    cost = np.empty(count + 1)  # of the best partition of what is in front of each place
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


def _refined(series: np.ndarray, stretch: Stretch, width: int) -> Stretch:
    """From bins to rows: each end at that row of the bins beside it where the two levels part best."""
    first = _parting(series, stretch.first * width, width)
    end = len(series) - _parting(series[::-1], len(series) - min(stretch.end * width, len(series)), width)
    return Stretch(first, max(end, first), stretch.level)


def _parting(series: np.ndarray, around: int, width: int) -> int:
    """The row around which a series goes from one level to another."""
    if around <= 0:
        return 0
    begin, stop = max(around - width, 0), min(around + width, len(series))
    before = np.median(series[max(begin - width, 0) : begin]) if begin else series[0]
    behind = np.median(series[stop : stop + width]) if stop < len(series) else series[-1]
    middle = (before + behind) / 2
    higher = np.where(series[begin:stop] > middle, 1.0, -1.0) * (1.0 if behind > before else -1.0)
    return begin + int(np.concatenate([[0.0], np.cumsum(higher)]).argmin())
