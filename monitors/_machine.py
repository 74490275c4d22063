"""What the machine has left for this process: processor time and memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from adaptive.extend import Reading, Source, allowed_cpus, read

# Seconds. The kernel counts busy time in ticks of 10 ms, so a share over less than this would be coarse. And it bounds
# the cost: 20 to 100 microseconds for a measurement, 0.2 for the steps in between.
INTERVAL = 0.1


class Paced:
    """Measures at most once in an interval, and else repeats itself."""

    def __init__(self, measure: Callable[[], float], first: float, due: float):
        self._measure, self._value, self._due = measure, first, due

    def __call__(self) -> float:
        now = time.monotonic()
        if now >= self._due:
            self._value, self._due = self._measure(), now + INTERVAL
        return self._value


# --- processor --------------------------------------------------------------------------------------------------------


class CpuTimes(NamedTuple):
    """Processor seconds since boot, over the cores that this process may run on."""

    cores: frozenset[int]
    total: float
    idle: float
    own: float  # this process's, all threads


def cpu_times() -> CpuTimes:
    """Read the counters."""
    import psutil

    per_core = psutil.cpu_times(percpu=True)
    allowed = allowed_cpus()
    # Cores are listed in order and without their numbers: where some are offline, the numbers do not fit the list.
    cores = frozenset(allowed) if max(allowed) < len(per_core) else frozenset(range(len(per_core)))
    rows = [per_core[core] for core in cores]
    guests = sum(getattr(row, "guest", 0) + getattr(row, "guest_nice", 0) for row in rows)  # in user and nice as well
    idle = sum(row.idle + getattr(row, "iowait", 0) for row in rows)
    return CpuTimes(cores, sum(map(sum, rows)) - guests, idle, time.process_time())


class CpuShare:
    """The share of processor time between two readings that others did not take."""

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


def _read_cpu(reading: Reading) -> float:
    del reading
    return _cpu_share()()


CPU_AVAILABLE = Source("cpu_available", _read_cpu, stand_in=np.nan)


def cpu_available() -> jax.Array:
    """The share of processor time that this worker can have, from 0 to 1: what other processes have left it.

    Over the cores that this process may run on (its affinity), and the time since the last measurement, of at least a
    tenth of a second,

        1 - (busy time - this process's own) / time

    Time that the process took itself was there for it to take: counted as busy (as in `100 - cpu_percent`, that LB-BSP
    reads), a worker at full speed would look like one with nothing left, and the speed would predict the number instead
    of the number the speed. Time stolen by a hypervisor counts as taken by others. Several workers of one process read
    the same share; a limit set on a container is not seen, as it does not change.

    Returns:
      A float32 scalar, measured at the start of the step. Local. NaN until a tenth of a second was watched, and outside
      a program.

    Example:
      >>> free = comm.all_gather(mon.cpu_available())                    # doctest: +SKIP

    References:
      Input c of the speed predictor of Chen et al. 2020, "Semi-dynamic load balancing", section 3.
    """
    _cpu_share()  # watch from here on: the first step can then know what went on while the program was built
    return read(CPU_AVAILABLE)


# --- memory -----------------------------------------------------------------------------------------------------------

# Limit, usage, and the entry of memory.stat with what the kernel can drop; of control groups version 2 and 1.
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class MemoryLimit(NamedTuple):
    """A control group that may hold less than the machine has."""

    limit: int  # bytes
    usage: Path
    stat: Path
    droppable: str

    def left(self) -> float:
        """Bytes until the limit is reached; file caches that can be dropped do not count."""
        entries = dict(line.split() for line in self.stat.read_text().splitlines())
        return float(max(self.limit - int(self.usage.read_text()) + int(entries.get(self.droppable, 0)), 0))


def memory_limits(membership: Path, root: Path, machine_bytes: int) -> Iterator[MemoryLimit]:
    """The limits on the control groups that this process is in, and on those around them.

    In a container the path may be that of the host, and the process's own group be mounted at the root: what is not
    there is passed over.
    """
    lines = membership.read_text().splitlines() if membership.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        group = top / path.lstrip("/")
        for folder in [f for f in (group, *group.parents) if f.is_relative_to(top)]:
            for limit, usage, droppable in _MEMORY_FILES:
                text = (folder / limit).read_text().strip() if (folder / limit).exists() else "max"
                if text != "max" and int(text) < machine_bytes:
                    yield MemoryLimit(int(text), folder / usage, folder / "memory.stat", droppable)


class MemoryLeft:
    """The least of what the system and the limits around this process have left. Limits are looked up once."""

    def __init__(self, membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")):
        import psutil

        self._system = psutil.virtual_memory
        self._limits = list(memory_limits(membership, root, self._system().total))

    def __call__(self) -> float:
        return min([float(self._system().available), *(limit.left() for limit in self._limits)])


@lru_cache(maxsize=1)
def _memory() -> Paced:
    return Paced(MemoryLeft(), first=math.nan, due=-math.inf)


def _read_memory(reading: Reading) -> float:
    del reading
    return _memory()()


MEMORY_AVAILABLE = Source("memory_available", _read_memory, stand_in=np.nan)


def memory_available() -> jax.Array:
    """Bytes of main memory that this worker's process could still take without swapping.

    The system's estimate, or what is left under the limit of a control group (a container, a Slurm job) if that is
    less; file caches that can be dropped count as left. Measured at the start of the step, at most ten times a second.
    Several workers of one process read the same.

    Returns:
      A float32 scalar, in bytes. Local. NaN outside a program.

    Example:
      >>> least = comm.all_reduce(mon.memory_available(), op="min")      # doctest: +SKIP

    References:
      Input m of the speed predictor of Chen et al. 2020, "Semi-dynamic load balancing", section 3.
    """
    return read(MEMORY_AVAILABLE)
