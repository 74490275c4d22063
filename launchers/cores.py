"""The cores of this host, as far as they may be used."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import NamedTuple

import psutil


class Cores(NamedTuple):
    """How many there are for a job, and what keeps it from having more.

    Attributes:
      usable: physical cores.
      bindable: whether a launcher may hand them out one by one. It counts from the first of the machine, and does not
        see that this process may use others only (`taskset`), or a part of their time.
      quota: how many cores' time the container has; `None` without a limit.
    """

    usable: int
    bindable: bool = True
    quota: float | None = None


def cores() -> Cores:
    """Those that this process, and what it starts here, may use."""
    logical = psutil.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or logical
    allowed = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else logical
    count = max(1, allowed * physical // logical)
    quota = cpu_quota()
    limited = quota is not None and quota < count
    return Cores(ceil(quota) if quota is not None and limited else count, allowed == logical and not limited, quota)


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """How many cores' time this process's container may take; `None` where that is not limited.

    Containers see all cores of their machine, so XLA starts a thread for each, and all of them are stopped together
    when the time is used up.
    """
    try:
        if (both := root / "cpu.max").exists():
            quota, period = both.read_text().split()
        else:
            quota, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # none is set ("max"), or there is no such thing here
        return None
