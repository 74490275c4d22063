"""Facts about one process and its host: cores, devices, versions, launcher."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import adaptive
from adaptive.base.cores import allowed_cpus, chosen_threads
from adaptive.base.launcher import launcher, tasks_not_started
from launchers.command import intruder
from launchers.cores import cpu_quota
from launchers.ending import LAUNCHER

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint", "mpi4py", "adaptive-dataflow")
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_LIMITS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", LAUNCHER)  # which share a GPU's memory
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


@dataclass(frozen=True)
class JobFacts:
    """Facts about one process and its host, as plain data that can be sent as JSON.

    Attributes:
      rank: the process's rank; 0 without a launcher.
      launcher: name of the launcher; "" without one.
      launched: number of processes in the job according to the launcher; 0 if unknown.
      processes: number of processes in MPI's world; 0 if MPI is not loaded.
      library: MPI's version string.
      trouble: why MPI could not be loaded in a launched process; "" if it could.
      survives: whether MPI keeps the other ranks running when one dies.
      cpus: the cores that this process may use.
      logical: number of logical cores of the host.
      quota: CPU limit of the container, in cores; `None` without a limit.
      threads: size of XLA's thread pool if it was set; 0 means one thread per core of `cpus`.
      processor: name of the processor model.
      devices: JAX's local devices, described.
      no_devices: JAX's error if it has no devices; else "".
      gpus: number of NVIDIA GPUs of the host, whether or not JAX uses them.
      visible: value of CUDA_VISIBLE_DEVICES.
      limited: whether JAX takes a part of a GPU's memory that leaves room for other ranks: set by a variable, or by
        `adaptive run`.
      platforms: value of JAX_PLATFORMS.
      versions: versions of the installed packages; "missing" for those that are not installed.
      code: version of the imported adaptive-dataflow, which may differ from the installed one.
      intruder: description of another project's package `adaptive` that is installed; "" if there is none.
      tasks: number of tasks of the Slurm job if they were not started; else 0.
    """

    host: str
    pid: int
    rank: int = 0
    launcher: str = ""
    launched: int = 0
    processes: int = 0
    library: str = ""
    trouble: str = ""
    survives: bool = False
    cpus: tuple[int, ...] = (0,)
    logical: int = 1
    quota: float | None = None
    threads: int = 0
    processor: str = ""
    devices: tuple[str, ...] = ("cpu",)
    no_devices: str = ""
    gpus: int = 0
    visible: str = ""
    limited: bool = False
    platforms: str = ""
    python: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    code: str = ""
    intruder: str = ""
    tasks: int = 0


def facts(environ: Mapping[str, str] = os.environ) -> JobFacts:
    """Collect the facts about this process, without loading MPI."""
    devices, why = _devices()
    started = launcher(environ)
    threads = chosen_threads(environ)
    return JobFacts(
        host=socket.gethostname(),
        pid=os.getpid(),
        rank=next((int(environ[name]) for name in _RANKS if environ.get(name, "").isdigit()), 0) if started else 0,
        launcher=started.name if started else "",
        launched=(started.processes or 0) if started else 0,
        cpus=tuple(sorted(allowed_cpus())),
        logical=os.cpu_count() or 1,
        quota=cpu_quota(),
        threads=int(threads) if threads.isdigit() else 0,
        processor=_processor(),
        devices=devices,
        no_devices=why,
        gpus=len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]),
        visible=environ.get("CUDA_VISIBLE_DEVICES", ""),
        limited=any(name in environ for name in _LIMITS),
        platforms=environ.get("JAX_PLATFORMS", ""),
        python=platform.python_version(),
        versions=_versions(),
        code=adaptive.__version__,
        intruder=intruder(),
        tasks=tasks_not_started(environ),
    )


def _devices() -> tuple[tuple[str, ...], str]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else a second rank on a GPU would fail
    import jax

    try:
        found = jax.local_devices()
    except RuntimeError as error:
        return (), " ".join(str(error).split())
    return tuple(d.platform if d.platform == "cpu" else f"{d.device_kind} ({d.platform}:{d.id})" for d in found), ""


def _versions() -> dict[str, str]:
    found = {}
    for name in (*PACKAGES, *PLUGINS):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if name in PACKAGES:
                found[name] = "missing"
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*:\s*(.+)", info.read_text()) if sys.platform == "linux" and info.exists() else None
    return named[1].strip() if named else platform.processor() or platform.machine()
