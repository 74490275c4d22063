"""The cores of this host that this process may use: its CPU affinity and its container's quota."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import NamedTuple

import psutil


class Cores(NamedTuple):
    """The cores that a job may use on this host.

    Attributes:
      usable: number of physical cores.
      bindable: whether a launcher may bind ranks to single cores. Launchers count from the machine's first core, and
        ignore the affinity of this process (`taskset`) and its CPU quota.
      quota: CPU time that the container may use per second of wall time, in cores; `None` without a limit.
    """

    usable: int
    bindable: bool = True
    quota: float | None = None


def cores() -> Cores:
    """Return the cores that this process and its children may use."""
    logical = psutil.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or logical
    allowed = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else logical
    count = max(1, allowed * physical // logical)
    quota = cpu_quota()
    limited = quota is not None and quota < count
    return Cores(ceil(quota) if quota is not None and limited else count, allowed == logical and not limited, quota)


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the CPU quota of this process's container, in cores; `None` without a limit.

    A container sees all cores of its machine, so XLA starts a thread for each, and the kernel stops all of them when
    the quota of a period is used up.
    """
    try:
        if (both := root / "cpu.max").exists():
            quota, period = both.read_text().split()
        else:
            quota, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no quota is set ("max"), or this host has no cgroups
        return None
