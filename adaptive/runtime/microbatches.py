"""The choice of microbatches for a local batch, by predicted time.

A batch of 40 is a call of 32 and one of 8. Kernels of powers of two make every size, and since two equal microbatches
can be one of twice the size, the cheapest way to make a power of two is either its own kernel or twice the cheapest way
to make its half: bigger is not always faster (a small conv net on one core: 1024 as one kernel 88 ms, as eight of 128
45 ms). Kernels of other sizes come before them, in all numbers that fit: what kernels can make is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf

Microbatches = tuple[int, ...]
GAIN = 0.97  # more calls must be this much faster than the fewest: timings are not exact, and calls are not free
OVERHEAD_SECONDS = 50e-6  # of a call, whatever its size, while nothing better is known


def cheapest(size: int, kernels: Iterable[int], seconds: Callable[[int], float]) -> Microbatches | None:
    """Return the microbatches with the least predicted time that sum to `size`, largest first; `None` if none do.

    Args:
      size: examples in the local batch.
      kernels: sizes that there are kernels for, each used as often as wanted.
      seconds: predicted time of one call, positive.
    """
    prices = {k: seconds(k) for k in kernels if k <= size}
    best = _best(size, prices)
    if best is None:
        return None
    # Of the fewest calls the cheapest: each counts one, and the times of all of them together less than one.
    small = 0.5 / (max(prices.values()) * (size // min(prices) + 1))
    fewest = _best(size, {k: 1 + small * price for k, price in prices.items()})
    assert fewest is not None, "whether there is a way does not depend on prices"
    worth_it = sum(prices[k] for k in best) < GAIN * sum(prices[k] for k in fewest)
    return tuple(sorted(best if worth_it else fewest, reverse=True))


def candidates(size: int, kernels: Iterable[int], seconds: Callable[[int], float]) -> dict[Microbatches, float]:
    """Return the ways worth comparing to make `size`, and their predicted seconds; empty where there are none.

    Beside the cheapest way and that of the fewest calls, for each kernel the way that uses it as often as it fits.
    """
    prices = {k: seconds(k) for k in kernels if k <= size}
    ways = {cheapest(size, prices, prices.__getitem__), cheapest(size, prices, lambda k: 1.0)}
    for k in prices:
        rest = cheapest(size % k, prices, prices.__getitem__) if size % k else ()
        if rest is not None:
            ways.add(tuple(sorted((k,) * (size // k) + rest, reverse=True)))
    return {way: sum(prices[k] for k in way) for way in ways if way is not None}


def _best(size: int, prices: Mapping[int, float]) -> Microbatches | None:
    """Return the microbatches with the least sum of prices."""
    ways = _powers(size, prices)
    # By what other kernels leave to the powers of two: the least that they cost, and the last of them.
    rests: dict[int, tuple[float, int]] = {size: (0.0, 0)}
    for odd in sorted(k for k in prices if k & (k - 1)):
        for rest in sorted(rests, reverse=True):
            while rest >= odd:  # one more, and one more, unless there is a cheaper way to come to the same rest
                cost = rests[rest][0] + prices[odd]
                if rest - odd in rests and rests[rest - odd][0] <= cost:
                    break
                rest -= odd
                rests[rest] = (cost, odd)
    left = min(rests, key=lambda rest: rests[rest][0] + _from_powers(rest, ways)[0])
    cost, microbatches = _from_powers(left, ways)
    while left < size:
        odd = rests[left][1]
        microbatches, left = (*microbatches, odd), left + odd
    return None if cost == inf else microbatches


Way = tuple[float, Microbatches]


def _powers(size: int, prices: Mapping[int, float]) -> dict[int, Way]:
    """Return the cheapest way to make each power of two up to `size` or the largest kernel."""
    ways: dict[int, Way] = {}
    power, top = 1, max((k for k in prices if k & (k - 1) == 0), default=1)
    while power <= min(size, top):
        half = ways.get(power // 2, (inf, ()))
        ways[power] = min((prices.get(power, inf), (power,)), (2 * half[0], 2 * half[1]))
        power *= 2
    return ways


def _from_powers(size: int, ways: Mapping[int, Way]) -> Way:
    cost = 0.0
    microbatches: Microbatches = ()
    for power in sorted(ways, reverse=True):
        times, size = divmod(size, power)
        if times:
            cost, microbatches = cost + times * ways[power][0], microbatches + times * ways[power][1]
    return (cost, microbatches) if size == 0 else (inf, ())


def predict(size: int, measured: Mapping[int, float], overhead_seconds: float = OVERHEAD_SECONDS) -> float:
    """Return the seconds of one microbatch: measured, or scaled from the nearest size that is.

    Args:
      measured: seconds by size.
      overhead_seconds: what a call costs whatever its size; makes fewer microbatches win where nothing is known.
    """
    if size in measured:
        return measured[size]
    larger = min((m for m in measured if m > size), default=None)
    nearest = larger if larger is not None else max(measured, default=None)
    per_example = measured[nearest] / nearest if nearest is not None else 10e-6
    return overhead_seconds + per_example * size
