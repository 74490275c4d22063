"""The cores and GPUs of a host, and how its ranks divide them."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path

from .ending import SPAWNED

CORES = "ADAPTIVE_CORES"  # set by the launcher: BIND or SHARE, and the number of ranks that it has started
BIND, SHARE = "bind", "share"
GPUS = "ADAPTIVE_GPUS_PER_HOST"  # set by the launcher: ranks see parts of this many GPUs; 0: every rank sees all
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# The user's settings of GPU memory; by default JAX preallocates three quarters of it.
_MEMORY = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")
THREADS = ("PJRT_NPROC", "NPROC")  # either sets the size of XLA's thread pool
_CPUS = Path("/sys/devices/system/cpu")


def cores(cpus: Path = _CPUS) -> list[list[int]]:
    """Return the physical cores that this process may use, each as the numbers of its hardware threads.

    The affinity of this process (`taskset`, a batch system's) is respected. Cores of one socket are neighbors.
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


def take_cores(environ: MutableMapping[str, str], quota: float | None) -> None:
    """Bind this process to its part of the host's cores, and set the number of its computing threads.

    With fewer cores than ranks, or under a `quota` (of `cpu_quota`), nothing is bound, and each rank gets its part of
    the threads, by a variable in `environ`. Does nothing if the launcher does not ask for it, because the user's
    options place or bind ranks.
    """
    how, _, started = environ.get(CORES, "").partition(" ")
    local, ranks = number_in(environ, _LOCAL_RANKS), number_in(environ, _LOCAL_SIZES)
    if not how or local is None or not ranks:
        return
    there = cores()
    if SPAWNED in environ:  # it shares the cores of the others
        how, ranks = SHARE, int(started)
    each = usable(there, quota) // ranks
    if how == BIND and each > 0 and usable(there, quota) == len(there) and hasattr(os, "sched_setaffinity"):
        with suppress(OSError):  # not allowed here
            os.sched_setaffinity(0, [cpu for core in there[local * each : (local + 1) * each] for cpu in core])
    if (ranks > 1 or quota is not None) and not any(environ.get(name) for name in THREADS):
        environ[THREADS[0]] = str(max(1, each))


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the CPU quota of this process's container (control groups, version 2), in cores; `None` without a limit.

    A container sees all cores of its machine, so XLA starts a thread for each, and the kernel stops all of them when
    the quota of a period is used up.
    """
    with suppress(OSError, ValueError):  # no quota is set ("max"), or this host has no such groups
        quota, period = (root / "cpu.max").read_text().split()
        return int(quota) / int(period)
    return None


def see_own_gpus(environ: MutableMapping[str, str]) -> None:
    """Restrict this rank to its part of the visible GPUs, by its number on its host: with `--gpus-per-host` an equal
    share of so many, else one of those that are there, round robin. Ranks that share a GPU share its memory. Changes
    `environ`.

    Raises:
      SystemExit: `--gpus-per-host` was given, and the host has no GPU for this rank or its number is unknown.
    """
    local, ranks, visible = number_in(environ, _LOCAL_RANKS), number_in(environ, _LOCAL_SIZES), environ.get(_VISIBLE)
    given = int(environ[GPUS]) if GPUS in environ else None
    if visible or (visible is not None and given is None):
        gpus = visible.split(",")
    else:
        gpus = [str(n) for n in range(gpus_here() if given is None else given)]
    gpus = [gpu for gpu in gpus if gpu not in ("", "-1", "NoDevFiles")]
    if given == 0 or (given is None and (local is None or (ranks or 1) == 1 or not gpus)):
        return
    if local is None:
        raise SystemExit(
            f"adaptive run: the launcher does not say which rank of its host this is ({_LOCAL_RANKS[0]}, …)"
        )
    if given is not None and local >= len(gpus):
        raise SystemExit(
            f"adaptive run: there is no GPU for rank {local} of this host: {_VISIBLE} has {', '.join(gpus)}. "
            "Start fewer ranks there, or let them share GPUs, without --gpus-per-host."
        )
    each = max(1, len(gpus) // (ranks or len(gpus))) if given is not None else 1
    first = local * each % len(gpus)
    environ[_VISIBLE] = ",".join(gpus[first : first + each])
    sharing = len(range(first, ranks or 1, len(gpus)))
    if sharing > 1 and not any(name in environ for name in _MEMORY):
        environ[_MEMORY[0]] = f"{0.9 / sharing:.2f}"


def gpus_here() -> int:
    """Return the number of this host's NVIDIA GPUs by their device files, because starting CUDA would take long."""
    return sum(node.name.removeprefix("nvidia").isdigit() for node in Path("/dev").glob("nvidia[0-9]*"))


def number_in(environ: Mapping[str, str], names: Sequence[str]) -> int | None:
    """Return the first of these environment variables that is a number, as an integer."""
    return next((int(environ[name]) for name in names if environ.get(name, "").isdigit()), None)
