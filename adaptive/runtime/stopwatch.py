"""A stopwatch that does not count the time of other processes on the same cores."""

from __future__ import annotations

import time
from math import inf

import jax


class Stopwatch:
    """Measures time on a device, without the time of other processes on its cores.

    On shared cores, time slices of other processes interrupt every long microbatch and hardly any short one. The least
    of three timings is then twice too long for a long microbatch and right for a short one, so batches would be split
    into the smallest microbatches. Processor time does not include these slices. If several threads compute, processor
    time exceeds wall time, and wall time is used.
    """

    def __init__(self, device: jax.Device):
        self._computes_here = device.platform == "cpu"
        self._began = self._now()

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time() if self._computes_here else inf

    @property
    def seconds(self) -> float:
        """Return the seconds since the stopwatch was created."""
        passed, computed = (now - began for now, began in zip(self._now(), self._began, strict=True))
        return min(passed, computed) if self._computes_here else passed
