"""Which kernel calls make up a local batch: the cheapest pieces, by measured time.

A batch of 40 is a call of 32 and one of 8. Kernels of powers of two make every size, and by the merging of equal pieces
into one of twice the size, the cheapest way to make a power of two is either its own kernel or twice the cheapest way
to
make its half: bigger is not always faster (a small conv net on one core: 1024 as one kernel 88 ms, as eight of 128 45
ms).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf

Pieces = tuple[int, ...]
GAIN = 0.97  # more calls must be this much faster than the fewest: timings are not exact, and calls are not free


def cheapest(size: int, kernels: Iterable[int], seconds: Callable[[int], float]) -> Pieces | None:
    """The pieces with the least predicted time that sum to `size`, largest first; `None` where the kernels cannot.

    Args:
      size: examples in the local batch.
      kernels: sizes that there are kernels for. Powers of two combine freely; another size is used as often as it fits,
        the rest being made from powers of two.
      seconds: predicted time of one call.
    """
    kernels = set(kernels)
    fewest = _best(size, kernels, lambda s: 1.0)
    best = _best(size, kernels, seconds)
    if best is None or fewest is None:
        return None
    worth_it = sum(map(seconds, best)) < GAIN * sum(map(seconds, fewest))
    return tuple(sorted(best if worth_it else fewest, reverse=True))


def _best(size: int, kernels: set[int], seconds: Callable[[int], float]) -> Pieces | None:
    ways = _powers(size, kernels, seconds)
    best = _from_powers(size, ways)
    for odd in sorted(k for k in kernels if k & (k - 1) and k <= size):
        rest = _from_powers(size % odd, ways)
        cost = size // odd * seconds(odd) + rest[0]
        if cost < best[0]:
            best = (cost, (odd,) * (size // odd) + rest[1])
    return None if best[0] == inf else best[1]


Way = tuple[float, Pieces]


def _powers(size: int, kernels: set[int], seconds: Callable[[int], float]) -> dict[int, Way]:
    """The cheapest way to make each power of two up to `size`, or to the largest kernel if that is less."""
    ways: dict[int, Way] = {}
    power, top = 1, max((k for k in kernels if k & (k - 1) == 0), default=1)
    while power <= min(size, top):
        half = ways.get(power // 2, (inf, ()))
        ways[power] = min((seconds(power), (power,)) if power in kernels else (inf, ()), (2 * half[0], 2 * half[1]))
        power *= 2
    return ways


def _from_powers(size: int, ways: Mapping[int, Way]) -> Way:
    cost = 0.0
    pieces: Pieces = ()
    for power in sorted(ways, reverse=True):
        times, size = divmod(size, power)
        if times:
            cost, pieces = cost + times * ways[power][0], pieces + times * ways[power][1]
    return (cost, pieces) if size == 0 else (inf, ())


def predict(size: int, measured: Mapping[int, float], call_seconds: float = 50e-6) -> float:
    """Seconds of one call, measured or, while it is not, scaled from the nearest size that is.

    Args:
      measured: seconds by size.
      call_seconds: what a call costs whatever its size; makes fewer pieces win where nothing is known.
    """
    if size in measured:
        return measured[size]
    larger = min((m for m in measured if m > size), default=None)
    nearest = larger if larger is not None else max(measured, default=None)
    per_example = measured[nearest] / nearest if nearest is not None else 10e-6
    return call_seconds + per_example * size
