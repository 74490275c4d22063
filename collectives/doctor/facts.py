"""Facts that one process knows of itself and its host."""

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
from adaptive.extend import allowed_cpus, chosen_threads, launcher, tasks_not_started
from launchers.command import intruder
from launchers.cores import cpu_quota

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint", "mpi4py", "adaptive-dataflow")
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


@dataclass(frozen=True)
class JobFacts:
    """One process. All of it is plain data, so that it travels as JSON.

    Attributes:
      rank: by its launcher; 0 where there is none.
      launcher: who started it; "" if nobody did.
      launched: as one of how many, by the launcher; 0 where it does not say.
      processes: how many MPI knows of; 0 where MPI was not asked, or could not be loaded.
      library: MPI's own words of what it is.
      cuda: whether MPI says that it takes the memory of NVIDIA's GPUs.
      trouble: why there is no MPI, though a launcher has started this process; "" if there is.
      cpus: the cores that it may use, of `logical` there are.
      quota: how many cores' time its container has; `None` without a limit.
      threads: the size of XLA's pool, where it was set; else 0: as many as `cpus`.
      devices: JAX's, in words.
      no_devices: why there are none.
      gpus: how many of NVIDIA's the host has, whatever JAX makes of them.
      visible: CUDA_VISIBLE_DEVICES.
      code: the version of what is imported; `versions` are of what is installed.
      tasks: that Slurm has for this job, where none was started.
    """

    host: str
    pid: int
    rank: int = 0
    launcher: str = ""
    launched: int = 0
    processes: int = 0
    library: str = ""
    cuda: bool = False
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
    platforms: str = ""
    python: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    code: str = ""
    intruder: str = ""
    tasks: int = 0


def facts(environ: Mapping[str, str] = os.environ) -> JobFacts:
    """Collect the facts of this process, without asking MPI."""
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
        platforms=environ.get("JAX_PLATFORMS", ""),
        python=platform.python_version(),
        versions=_versions(),
        code=adaptive.__version__,
        intruder=intruder(),
        tasks=tasks_not_started(environ),
    )


def _devices() -> tuple[tuple[str, ...], str]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # ranks that share a GPU are to find that out
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
