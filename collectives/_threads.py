"""Ranks that share a host must share its cores: find out whether they do, and say how to arrange it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence


class OversubscriptionWarning(UserWarning):
    """Ranks on one host start more computing threads than it has cores."""


def allowed_cpus() -> frozenset[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def threads_are_chosen(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the size of XLA's thread pool was set by hand.

    Only these two do it. The often recommended XLA_FLAGS="--xla_cpu_multi_thread_eigen=false
    intra_op_parallelism_threads=1" does not: with JAX 0.10 it left a matrix product on 1.9 of 2 cores, as without;
    PJRT_NPROC=1 brought it to 1.0.
    """
    return bool(environ.get("PJRT_NPROC") or environ.get("NPROC"))


def oversubscription(cpus: Sequence[frozenset[int]], launcher: str = "") -> str | None:
    """What to tell the user about one host, or `None` where all is well.

    XLA starts as many threads as a process may use cores, in every rank.

    Args:
      cpus: for each rank on the host that did not choose its number of threads: the cores that it may use.
      launcher: who started the ranks; the command to write depends on it.
    """
    threads, cores = sum(map(len, cpus)), len(frozenset().union(*cpus))
    if len(cpus) < 2 or threads <= cores:
        return None
    said = f"{len(cpus)} ranks on one host start {threads} computing threads on {cores} core{'s' * (cores > 1)}. "
    each = cores // len(cpus)
    if each == 0:
        return said + f"Start no more than {cores} there, or one thread in each:\n    export PJRT_NPROC=1"
    if "Slurm" in launcher:
        command = f"srun --cpus-per-task={each} --cpu-bind=cores …"
    elif "mpiexec" in launcher:
        command = f"mpiexec -bind-to core:{each} …"
    else:
        command = "mpirun --bind-to core …" if each == 1 else f"mpirun --map-by slot:PE={each} --bind-to core …"
    return (
        said + f"Give each rank cores of its own:\n    {command}\nor limit its threads:\n    export PJRT_NPROC={each}"
    )
