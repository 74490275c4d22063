"""The cores of a host, and how its ranks divide them. Imports only the standard library, because `rank.py` loads it."""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path

CORES = "ADAPTIVE_CORES"  # set by the launcher: BIND or SHARE, and the number of ranks that it has started
BIND, SHARE = "bind", "share"
THREADS = ("PJRT_NPROC", "NPROC")  # either sets the size of XLA's thread pool
_CPUS = Path("/sys/devices/system/cpu")


def cores(cpus: Path = _CPUS) -> list[list[int]]:
    """Return the physical cores that this process may use, each as the numbers of its hardware threads.

    The affinity of this process (`taskset`, a batch system's) is respected. Cores of one socket are neighbors.

    Args:
      cpus: the kernel's folder on them.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    found: dict[tuple[int, ...], list[int]] = {}
    for cpu in sorted(allowed):
        place: tuple[int, ...] = (0, cpu)
        with suppress(OSError, ValueError):
            folder = cpus / f"cpu{cpu}" / "topology"
            place = tuple(int((folder / name).read_text()) for name in ("physical_package_id", "die_id", "core_id"))
        found.setdefault(place, []).append(cpu)
    return [found[place] for place in sorted(found)]


def usable(all_cores: Sequence[Sequence[int]], quota: float | None) -> int:
    """Return the number of cores that a host's ranks may use: not more than the container's quota, rounded up."""
    return len(all_cores) if quota is None else min(len(all_cores), ceil(quota))


def take_cores(
    local: int | None, ranks: int | None, environ: MutableMapping[str, str], spawned: bool, quota: float | None
) -> None:
    """Bind this process to its part of the host's cores, and set the number of its computing threads.

    With fewer cores than ranks, or under a quota, nothing is bound, and each rank gets its part of the threads. Does
    nothing if the launcher does not ask for it, because the user's options place or bind ranks.

    Args:
      local, ranks: this rank's number on its host, and the number of ranks there; None if unknown.
      environ: environment variables, to which the number of threads is added.
      spawned: whether other ranks have spawned this one. It shares their cores.
      quota: processor seconds per second that the container may use; None without a limit.
    """
    how, _, started = environ.get(CORES, "").partition(" ")
    if not how or local is None or not ranks:
        return
    there = cores()
    if spawned:
        how, ranks = SHARE, int(started)
    each = usable(there, quota) // ranks
    if how == BIND and each > 0 and usable(there, quota) == len(there) and hasattr(os, "sched_setaffinity"):
        with suppress(OSError):  # not allowed here
            os.sched_setaffinity(0, [cpu for core in there[local * each : (local + 1) * each] for cpu in core])
    if (ranks > 1 or quota is not None) and not any(environ.get(name) for name in THREADS):
        environ[THREADS[0]] = str(max(1, each))


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
