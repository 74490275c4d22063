"""A stopwatch that leaves out time in which other processes had the cores."""

from __future__ import annotations

import time
from math import inf

import jax


class Stopwatch:
    """Measures time on a device without that in which other processes had its cores.

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
        """Seconds since the stopwatch was made."""
        passed, computed = (now - began for now, began in zip(self._now(), self._began, strict=True))
        return min(passed, computed) if self._computes_here else passed
