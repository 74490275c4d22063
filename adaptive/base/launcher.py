"""Who started this process, and as one of how many: what the launchers of MPI programs leave in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple


class Launcher(NamedTuple):
    """A launcher, and how many processes it says that it started; `None` where it does not say."""

    name: str
    processes: int | None


_SIZES = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun",
    "PMI_SIZE": "mpiexec (MPICH, Intel MPI and their kin)",
}


def launcher(environ: Mapping[str, str] = os.environ) -> Launcher | None:
    """The launcher that started this process, or `None` where it was started by hand.

    Slurm sets variables in jobs of one task and in batch scripts too, where there is nobody to find: it counts from two
    tasks in this job step.
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
    """How many tasks a Slurm job has where nobody has started them, and this process is one by itself: 0 if not so.

    Such is a batch script that says `python train.py` where `srun` is missing, or a shell inside a job.
    """
    tasks = environ.get("SLURM_NTASKS", "")
    alone = "SLURM_JOB_ID" in environ and launcher(environ) is None
    return int(tasks) if alone and tasks.isdigit() and int(tasks) > 1 else 0
