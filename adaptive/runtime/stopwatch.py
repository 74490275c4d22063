"""A stopwatch that does not count the time of other processes on the same cores."""

from __future__ import annotations

import functools
import time
from math import inf

import jax

_LOOKS = 100_000  # at the clock, while its step is measured: some 30 ms
_STEPS = 10  # of the processor's clock, of which a shorter time is not known


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
        return undisturbed(passed, computed) if self._computes_here else passed


def undisturbed(passed: float, computed: float) -> float:
    """Return the seconds of a computation without those of other processes on its cores.

    Args:
      passed: its seconds by `time.perf_counter`.
      computed: its seconds by `time.process_time`. Not used if they are a few steps of this clock.
    """
    return min(passed, computed) if computed >= _STEPS * clock_step() else passed


@functools.cache
def clock_step() -> float:
    """Return the seconds by which `time.process_time` advances; infinite if it does not.

    Usually less than a microsecond. On Linux it is a tick, of 1 to 10 ms, in a process with a limit of processor time
    (`ulimit -t`, as batch systems set it), and short kernels would take 0 s.
    """
    seen = [time.process_time()]
    for _ in range(_LOOKS):
        now = time.process_time()
        if now != seen[-1]:
            seen.append(now)
            if len(seen) == 3:  # the first change may come at once, in the middle of a tick
                return seen[2] - seen[1]
    return inf
