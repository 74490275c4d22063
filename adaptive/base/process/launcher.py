"""The launcher that started this process, read from the environment variables that MPI launchers set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple


class Launcher(NamedTuple):
    """A launcher and the number of processes that it started; `None` if unknown."""

    name: str
    processes: int | None


_SIZES = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun",
    "PMI_SIZE": "mpiexec (MPICH, Intel MPI and their kin)",
}


def launcher(environ: Mapping[str, str] = os.environ) -> Launcher | None:
    """Return the launcher that started this process, or `None` if there is none.

    Slurm sets its variables also in batch scripts and in jobs of one task, so it counts only from two tasks in this job
    step.
    """
    for variable, name in _SIZES.items():
        if environ.get(variable, "").isdigit():
            # srun speaks PMI to MPICH's processes; in a job of Slurm's so does hydra, which leaves another name too
            by_slurm = variable == "PMI_SIZE" and "SLURM_STEP_ID" in environ and "HYDI_CONTROL_FD" not in environ
            return Launcher("Slurm's srun" if by_slurm else name, int(environ[variable]))
    if "SLURM_STEP_ID" in environ:
        tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
        return Launcher("Slurm's srun", int(tasks)) if tasks.isdigit() and int(tasks) > 1 else None
    return Launcher("a PMIx launcher", None) if "PMIX_RANK" in environ else None


def tasks_not_started(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of a Slurm job's tasks if this process runs outside `srun`, else 0.

    That is the case in a batch script that lacks `srun` before `python train.py`, or in a shell inside a job.
    """
    tasks = environ.get("SLURM_NTASKS", "")
    alone = "SLURM_JOB_ID" in environ and launcher(environ) is None
    return int(tasks) if alone and tasks.isdigit() and int(tasks) > 1 else 0
