"""The choice of microbatches for a local batch, by predicted time.

A batch of 40 can run as microbatches of 32 and 8. Every size is a sum of powers of two. The cheapest way to compute a
power of two is either its own kernel or twice the cheapest way for its half: larger kernels are not always faster (a
small conv net on one core: 1024 as one kernel 88 ms, as eight of 128 45 ms). Kernels of other sizes are tried first, in
all multiplicities that fit, so that every size that the kernels can compose is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf

Microbatches = tuple[int, ...]
GAIN = 0.97  # more microbatches must be faster than the fewest by this factor, because timings are not exact
OVERHEAD_SECONDS = 50e-6  # assumed fixed cost of a microbatch until it is measured


def cheapest(size: int, kernels: Iterable[int], seconds: Callable[[int], float]) -> Microbatches | None:
    """Return the microbatches with the least predicted time that sum to `size`, largest first; `None` if none do.

    Args:
      size: examples in the local batch.
      kernels: sizes with kernels; each may be used several times.
      seconds: returns the predicted time of a microbatch; positive.
    """
    prices = {k: seconds(k) for k in kernels if k <= size}
    best = _best(size, prices)
    if best is None:
        return None
    # Minimize the number of microbatches first, then the time: each counts 1, and all times together less than 1.
    small = 0.5 / (max(prices.values()) * (size // min(prices) + 1))
    fewest = _best(size, {k: 1 + small * price for k, price in prices.items()})
    assert fewest is not None, "whether a sum exists does not depend on prices"
    worth_it = sum(prices[k] for k in best) < GAIN * sum(prices[k] for k in fewest)
    return tuple(sorted(best if worth_it else fewest, reverse=True))


def candidates(size: int, kernels: Iterable[int], seconds: Callable[[int], float]) -> dict[Microbatches, float]:
    """Return the splits of `size` that are worth comparing, with their predicted seconds; empty if there are none.

    These are the cheapest one, the one with fewest microbatches, and for each kernel the one that uses it most often.
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
    # By the rest that is left for powers of two: the least cost of other kernels, and the last kernel used.
    rests: dict[int, tuple[float, int]] = {size: (0.0, 0)}
    for odd in sorted(k for k in prices if k & (k - 1)):
        for rest in sorted(rests, reverse=True):
            while rest >= odd:  # add this kernel repeatedly, unless the rest can be reached at less cost
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
    """Return the seconds of one microbatch: measured, or scaled from the nearest measured size.

    Args:
      measured: seconds by size.
      overhead_seconds: fixed cost of a microbatch, so that without timings fewer microbatches are preferred.
    """
    if size in measured:
        return measured[size]
    larger = min((m for m in measured if m > size), default=None)
    nearest = larger if larger is not None else max(measured, default=None)
    per_example = measured[nearest] / nearest if nearest is not None else 10e-6
    return overhead_seconds + per_example * size
