"""Detection of ranks that share the cores of a host, and the command that gives each rank its own."""

from __future__ import annotations

from collections.abc import Sequence


class OversubscriptionWarning(UserWarning):
    """Ranks on one host start more computing threads than it has cores."""


def oversubscription(cpus: Sequence[frozenset[int]], launcher: str = "") -> str | None:
    """Return a warning about the ranks of one host, or None if they have cores of their own.

    XLA starts as many threads as a process may use cores, in every rank.

    Args:
      cpus: for each rank on the host that did not choose its number of threads: the cores that it may use.
      launcher: that started the ranks; the suggested command depends on it.
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
