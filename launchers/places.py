"""How many ranks are started, and how those of a host share it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .cores import Cores
from .hosts import Host
from .mpirun import Implementation, UsageError, bound, oversubscribed, places_itself, unbinds, unbound

THREADS = ("PJRT_NPROC", "NPROC")  # what sets the size of XLA's pool
# Of batch systems whose hosts mpirun finds by itself, and which are not counted here.
_UNCOUNTED = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE", "COBALT_NODEFILE", "FLUX_JOB_ID")


@dataclass
class Places:
    """What is said to the launcher, and to the user.

    Attributes:
      ranks: in all.
      options: of the launcher.
      environ: for all ranks.
      said: what was chosen for the user, a sentence each.
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
    """Where there are enough cores, each rank gets its own; else they share them. Either way XLA's threads are as many.

    Args:
      ranks: as asked for; by default as many as there are places.
      hosts: as asked for; none are those of the batch job, or this one.
      cores: of this host. Others are taken to have as many.
      gpus: of each host, one for a rank.
      oversubscribe: there may be more ranks than places.
      options: of the launcher, as the user gave them. Where they place ranks, nothing else does.

    Raises:
      UsageError: there are too few places, or GPUs.
    """
    chosen = Places(ranks or 0)
    if ranks is None:
        chosen.ranks, what = _as_many_as(hosts, cores, gpus, environ)
        chosen.said.append(f"-n is not given: {_many(chosen.ranks, 'rank')}, one for each {what}.")
    there = _busiest(chosen.ranks, hosts, oversubscribe, environ)
    if there is None:
        chosen.said.append("the hosts of this batch system are not counted here: ranks are bound as mpirun does it.")
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
    if placed and not unbinds(options):  # threads are as many as the cores that the user has bound ranks to
        return chosen
    if not enough:
        many = _many(there, "rank"), _many(cores.usable, "core")
        chosen.said.append(f"{many[0]} on {many[1]} of a host: they share them, and take turns.")
    if (there > 1 or cores.quota is not None) and not any(environ.get(name) for name in THREADS):
        chosen.environ[THREADS[0]] = str(each)
    return chosen


def _as_many_as(hosts: Sequence[Host], cores: Cores, gpus: int | None, environ: Mapping[str, str]) -> tuple[int, str]:
    """How many ranks to start where nobody has said so, and for what there is one each."""
    if gpus is not None:
        return gpus * max(1, len(hosts) or _nodes(environ)), "GPU"
    if hosts:
        return sum(host.slots for host in hosts), "place of the hosts"
    if tasks := environ.get("SLURM_NTASKS", ""):
        return int(tasks), "task of the Slurm job"
    return cores.usable, "core"


def _busiest(ranks: int, hosts: Sequence[Host], oversubscribe: bool, environ: Mapping[str, str]) -> int | None:
    """How many ranks are on the host that has the most, where hosts are filled one after another; `None`: not known."""
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
        return max(min(slot, max(0, ranks - sum(slots[:i]))) for i, slot in enumerate(slots))
    if not oversubscribe:
        raise UsageError(
            f"-n {ranks}, but {what} {_many(sum(slots), 'place')}. Ask for no more, or for more places "
            f"({'--hosts a:2,b:2' if hosts else 'sbatch --ntasks=…'}), or add --oversubscribe."
        )
    return max(*slots, -(-ranks // len(slots))) if len(slots) > 1 else ranks


def _slurm_slots(text: str) -> list[int]:
    """Slurm's SLURM_TASKS_PER_NODE, as `4(x2),1`."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def _nodes(environ: Mapping[str, str]) -> int:
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    return int(nodes) if nodes.isdigit() else 1


def _check_gpus(there: int, gpus: int, chosen: Places) -> None:
    if there > gpus:
        raise UsageError(
            f"{_many(there, 'rank')} on a host with {_many(gpus, 'GPU')}: two would share one, and each takes most of "
            f"its memory. Start {gpus} a host (-n, --hosts a:{gpus},b:{gpus}); or have them share, without "
            f"--gpus-per-host:\n    XLA_PYTHON_CLIENT_MEM_FRACTION={0.9 / there:.2f} adaptive run -n {there} …"
        )
    if there < gpus:
        chosen.said.append(f"{gpus - there} of {_many(gpus, 'GPU')} of a host are left alone: -n {gpus} takes all.")


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
