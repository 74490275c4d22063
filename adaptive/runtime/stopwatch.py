"""Times calls as if nobody else ran on the machine."""

from __future__ import annotations

import time
from math import inf

import jax


class Stopwatch:
    """Times calls on a device as if nobody else ran there.

    Where this process computes by itself, on cores that it shares, a neighbor's time slices hit every long call and
    hardly any short one. Of three timings the least is then twice too long for a long call and right for a short one,
    and batches would be cut into the smallest calls. The process's own processor time has no such slices in it; where
    several threads compute, it is longer than the time that passes, and says nothing.
    """

    def __init__(self, device: jax.Device):
        self._computes_here = device.platform == "cpu"
        self._began = self._now()

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time() if self._computes_here else inf

    @property
    def seconds(self) -> float:
        """Since it was made."""
        passed, computed = (now - began for now, began in zip(self._now(), self._began, strict=True))
        return min(passed, computed) if self._computes_here else passed
