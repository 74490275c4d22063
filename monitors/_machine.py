"""The machine's processor time and memory that are available to this process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import jax
import numpy as np

from adaptive.base.process.cores import allowed_cpus
from adaptive.base.process.host_memory import MemoryLeft
from adaptive.operators.sources import Source, read

# Seconds between measurements. The kernel counts busy time in ticks of 10 ms, and a measurement costs up to 0.1 ms.
INTERVAL = 0.1


class Paced:
    """A measurement that is taken at most once per `INTERVAL`; calls in between return the last value."""

    def __init__(self, measure: Callable[[], float], first: float, due: float):
        self._measure, self._value, self._due = measure, first, due

    def __call__(self) -> float:
        now = time.monotonic()
        if now >= self._due:
            self._value, self._due = self._measure(), now + INTERVAL
        return self._value


class CpuTimes(NamedTuple):
    """Processor seconds since boot, summed over the cores that this process may run on."""

    cores: frozenset[int]
    total: float
    idle: float
    own: float  # of this process, all threads


def cpu_times() -> CpuTimes:
    """Read the operating system's counters of processor time."""
    import psutil

    per_core = psutil.cpu_times(percpu=True)
    allowed = allowed_cpus()
    # Cores are listed in order without their numbers. If some are offline, the numbers do not match the list.
    cores = frozenset(allowed) if max(allowed) < len(per_core) else frozenset(range(len(per_core)))
    rows = [per_core[core] for core in cores]
    guests = sum(getattr(row, "guest", 0) + getattr(row, "guest_nice", 0) for row in rows)  # also part of user and nice
    idle = sum(row.idle + getattr(row, "iowait", 0) for row in rows)
    return CpuTimes(cores, sum(map(sum, rows)) - guests, idle, time.process_time())


class CpuShare:
    """The share of processor time since the last call that other processes did not use."""

    def __init__(self, counters: Callable[[], CpuTimes] = cpu_times):
        self._counters, self._before, self._share = counters, counters(), math.nan

    def __call__(self) -> float:
        before, now = self._before, self._counters()
        self._before = now
        total = now.total - before.total
        if now.cores == before.cores and total > 0:
            others = total - (now.idle - before.idle) - (now.own - before.own)
            self._share = min(max(1 - others / total, 0), 1)
        return self._share


@lru_cache(maxsize=1)
def _cpu_share() -> Paced:
    return Paced(CpuShare(), first=math.nan, due=time.monotonic() + INTERVAL)


CPU_AVAILABLE = Source("cpu_available", lambda reading: _cpu_share()(), stand_in=np.nan)


def cpu_available() -> jax.Array:
    """Return the share of processor time that is available to this worker, from 0 to 1.

    Over the cores that this process may run on, and at least a tenth of a second, the share is

        1 - (busy time - this process's own) / time

    Time stolen by a hypervisor counts as used by others. All workers of one process read the same share.

    Returns:
      A float32 scalar, without unit, measured at the start of the step. Local. NaN during the first tenth of a second,
      and outside a program.

    Example:
      >>> free = comm.all_gather(mon.cpu_available())                    # doctest: +SKIP

    References:
      Chen et al. 2020, "Semi-dynamic load balancing", section 3: input c of the speed predictor.
    """
    _cpu_share()  # start measuring now, so that the first step has the share while the program was built
    return read(CPU_AVAILABLE)


@lru_cache(maxsize=1)
def _memory() -> Paced:
    return Paced(MemoryLeft(), first=math.nan, due=-math.inf)


MEMORY_AVAILABLE = Source("memory_available", lambda reading: _memory()(), stand_in=np.nan)


def memory_available() -> jax.Array:
    """Return the bytes of main memory that this worker's process could still allocate without swapping.

    The operating system's estimate, or the rest up to the limit of a control group (a container, a Slurm job) if that
    is less; file caches that can be dropped count as available. All workers of one process read the same number.

    Returns:
      A float32 scalar, in bytes, measured at the start of the step, at most ten times a second. Local. NaN outside a
      program.

    Example:
      >>> least = comm.all_reduce(mon.memory_available(), op="min")      # doctest: +SKIP

    References:
      Chen et al. 2020, "Semi-dynamic load balancing", section 3: input m of the speed predictor.
    """
    return read(MEMORY_AVAILABLE)
