"""Seconds of a microbatch by size, from noisy timings."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import inf

import numpy as np

from adaptive.runtime.microbatches import OVERHEAD_SECONDS, predict

SAMPLES = 3  # timings of a size before its seconds count as known
_KEPT = 2 * SAMPLES + 1  # timings kept of a size
_SHORT = 8  # microbatches this many times shorter than the longest show the fixed cost


class MicrobatchTimes:
    """Estimates the seconds of one microbatch by its size.

    Noise only lengthens timings, so the least of a size's last timings counts. A microbatch takes at most as long as a
    larger one: if all timings of a size were disturbed, those of the next larger size are an upper bound.

    Args:
      overhead_seconds: the assumed fixed cost of a microbatch until it is measured.

    Attributes:
      seconds: seconds by size, for sizes with enough timings. Never changed in place.
    """

    def __init__(self, overhead_seconds: float = OVERHEAD_SECONDS):
        self._overhead_seconds = overhead_seconds
        self.seconds: Mapping[int, float] = {}
        self._timings: dict[int, deque[float]] = {}

    def record(self, size: int, seconds: float) -> None:
        """Add a timing of one microbatch."""
        timings = self._timings.setdefault(size, deque(maxlen=_KEPT))
        timings.append(seconds)
        if len(timings) >= SAMPLES:
            self._update()

    def forget(self, size: int) -> None:
        """Drop all timings of a size."""
        if self._timings.pop(size, None) is not None:
            self._update()

    def _update(self) -> None:
        found, least = {}, inf
        for size in sorted(self._timings, reverse=True):
            timings = self._timings[size]
            if len(timings) >= SAMPLES:
                found[size] = least = min(least, *timings)
        self.seconds = found

    def wanted(self, size: int) -> bool:
        """Return whether a size has too few timings."""
        return len(self._timings.get(size, ())) < SAMPLES

    def predict(self, size: int) -> float:
        """Return the seconds of one microbatch; with too few timings, scaled from the nearest known size."""
        return predict(size, self.seconds, self._overhead_seconds)

    def at_best(self, size: int) -> float:
        """Return the least measured seconds of a size; without timings, the prediction."""
        timings = self._timings.get(size)
        return min(timings) if timings else self.predict(size)

    def overhead_examples(self) -> float | None:
        """Return the overhead of one more microbatch, in examples that take as long; `None` if nothing is known.

        Computed from short microbatches: their seconds beyond the time of their examples.
        """
        known = self.seconds
        if not known:
            return None
        per_example = min(seconds / size for size, seconds in known.items())
        short = [size for size in known if _SHORT * size <= max(known)] or [0]
        return float(np.median([max(self.predict(size) / per_example - size, 0.0) for size in short]))
