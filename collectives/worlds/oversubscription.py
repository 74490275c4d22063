"""Detection of ranks that share the cores of a host, and the command that gives each rank its own."""

from __future__ import annotations

from collections.abc import Sequence


class OversubscriptionWarning(UserWarning):
    """The ranks of a host start more computing threads than the host has cores."""


def oversubscription(cpus: Sequence[frozenset[int]], launcher: str = "") -> str | None:
    """Return a warning if the ranks of a host oversubscribe its cores, else None.

    In every rank, XLA starts one thread per core that the process may use, unless the number is set.

    Args:
      cpus: for each rank on the host that does not set its number of threads, the cores that it may use.
      launcher: name of the launcher of the job, for the suggested command.
    """
    threads, cores = sum(map(len, cpus)), len(frozenset().union(*cpus))
    if len(cpus) < 2 or threads <= cores:
        return None
    said = f"{len(cpus)} ranks on one host start {threads} computing threads on {cores} core{'s' * (cores > 1)}. "
    each = cores // len(cpus)
    if each == 0:
        most = f"{cores} rank{'s' * (cores > 1)}"
        return said + f"Start at most {most} there, or one thread per rank:\n    export PJRT_NPROC=1"
    if "Slurm" in launcher:
        command = f"srun --cpus-per-task={each} --cpu-bind=cores …"
    elif "mpiexec" in launcher:
        command = f"mpiexec -bind-to core:{each} …"
    else:
        command = "mpirun --bind-to core …" if each == 1 else f"mpirun --map-by slot:PE={each} --bind-to core …"
    return (
        said + f"Give each rank cores of its own:\n    {command}\nor limit its threads:\n    export PJRT_NPROC={each}"
    )
