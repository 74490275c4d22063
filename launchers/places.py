"""The placement of ranks: how many to start, how many cores each gets, and what to tell the launcher."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .cores import Cores
from .hosts import Host
from .mpirun import Implementation, UsageError, bound, oversubscribed, places_itself, unbinds, unbound

THREADS = ("PJRT_NPROC", "NPROC")  # either sets the size of XLA's thread pool
# Variables of batch systems whose hosts mpirun finds by itself and this module does not count.
_UNCOUNTED = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE", "COBALT_NODEFILE", "FLUX_JOB_ID")


@dataclass
class Places:
    """The placement of a job's ranks, as options for the launcher and sentences for the user.

    Attributes:
      ranks: number of ranks on all hosts.
      options: the launcher's options for placement and binding.
      environ: environment variables for all ranks.
      said: the choices made for the user, one sentence each.
    """

    ranks: int
    options: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)


def places(
    mpi: Implementation,
    ranks: int | None,
    hosts: Sequence[Host],
    cores: Cores,
    *,
    gpus: int | None = None,
    oversubscribe: bool = False,
    options: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> Places:
    """Compute the placement of a job's ranks.

    With enough cores each rank is bound to its own; otherwise ranks share the cores. XLA's thread pool gets as many
    threads as a rank has cores.

    Args:
      mpi: the launcher.
      ranks: number of ranks; by default one per slot, Slurm task, GPU or core.
      hosts: hosts the user named; if empty, the hosts of the batch job, or this host.
      cores: cores of this host. Other hosts are assumed to have the same number.
      gpus: GPUs of each host, one for a rank.
      oversubscribe: allow more ranks than slots.
      options: the user's options of the launcher. If they place ranks, no options for placement are added.
      environ: environment variables of this process.

    Raises:
      UsageError: there are too few slots or GPUs.
    """
    chosen = Places(ranks or 0)
    if ranks is None:
        chosen.ranks, what = _as_many_as(hosts, cores, gpus, environ)
        chosen.said.append(f"-n is not given: starting {_many(chosen.ranks, 'rank')}, one per {what}.")
    there = _busiest(chosen.ranks, hosts, oversubscribe, environ)
    if there is None:
        chosen.said.append("the slots of this batch system's hosts are unknown: mpirun's default binding is used.")
        chosen.options = oversubscribed(mpi) * oversubscribe
        return chosen
    if gpus is not None:
        _check_gpus(there, gpus, chosen)
    each, enough = max(1, cores.usable // there), there <= cores.usable
    placed = places_itself(options, environ)
    if placed:
        chosen.options = oversubscribed(mpi) * (oversubscribe or (unbinds(options) and not enough))
    elif enough and cores.bindable:
        chosen.options = bound(mpi, each, oversubscribe)
    else:
        chosen.options = oversubscribed(mpi) * (oversubscribe or not enough) + unbound(mpi)
    if placed and not unbinds(options):  # XLA starts as many threads as the user's binding leaves cores
        return chosen
    if not enough:
        many = _many(there, "rank"), _many(cores.usable, "core")
        chosen.said.append(f"{many[0]} on {many[1]} of a host: the cores are oversubscribed.")
    if (there > 1 or cores.quota is not None) and not any(environ.get(name) for name in THREADS):
        chosen.environ[THREADS[0]] = str(each)
    return chosen


def _as_many_as(hosts: Sequence[Host], cores: Cores, gpus: int | None, environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the default number of ranks, and the resource of which each rank gets one."""
    if gpus is not None:
        return gpus * max(1, len(hosts) or _nodes(environ)), "GPU"
    if hosts:
        return sum(host.slots for host in hosts), "slot of the hosts"
    if tasks := environ.get("SLURM_NTASKS", ""):
        return int(tasks), "task of the Slurm job"
    return cores.usable, "core"


def _busiest(ranks: int, hosts: Sequence[Host], oversubscribe: bool, environ: Mapping[str, str]) -> int | None:
    """Return the number of ranks on the fullest host if hosts are filled one after another; `None` if unknown."""
    if not hosts and any(environ.get(name) for name in _UNCOUNTED):
        return None
    if hosts:
        slots = [host.slots for host in hosts]
        what = "--hosts names"
    elif environ.get("SLURM_JOB_ID") and environ.get("SLURM_TASKS_PER_NODE"):
        slots = _slurm_slots(environ["SLURM_TASKS_PER_NODE"])
        what = "the Slurm job has"
    else:
        return ranks
    if ranks <= sum(slots):
        return max(min(slot, ranks - sum(slots[:i])) for i, slot in enumerate(slots))
    if not oversubscribe:
        raise UsageError(
            f"-n {ranks}, but {what} {_many(sum(slots), 'slot')}. Start fewer ranks, or provide more slots "
            f"({'--hosts a:2,b:2' if hosts else 'sbatch --ntasks=…'}), or add --oversubscribe."
        )
    return max(*slots, -(-ranks // len(slots)))


def _slurm_slots(text: str) -> list[int]:
    """Return the slots of each node from SLURM_TASKS_PER_NODE, whose format is `4(x2),1`."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def _nodes(environ: Mapping[str, str]) -> int:
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    return int(nodes) if nodes.isdigit() else 1


def _check_gpus(there: int, gpus: int, chosen: Places) -> None:
    if there > gpus:
        raise UsageError(
            f"{_many(there, 'rank')} on a host with {_many(gpus, 'GPU')}: ranks would share a GPU, and each takes most "
            f"of its memory. Start {gpus} per host (-n, --hosts a:{gpus},b:{gpus}); or let them share, without "
            f"--gpus-per-host:\n    XLA_PYTHON_CLIENT_MEM_FRACTION={0.9 / there:.2f} adaptive run -n {there} …"
        )
    if there < gpus:
        chosen.said.append(f"{gpus - there} of {_many(gpus, 'GPU')} of a host are unused: -n {gpus} uses all.")


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
