"""Facts about one process and its host, as plain data that can be sent as JSON."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import adaptive
from adaptive.base.process.cores import allowed_cpus, chosen_threads
from adaptive.base.process.launcher import launcher, tasks_not_started
from launchers.command import intruder
from launchers.ending import LAUNCHER
from launchers.resources import cpu_quota

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint", "mpi4py", "adaptive-dataflow")
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_LIMITS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", LAUNCHER)  # which share a GPU's memory
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")

Facts = Mapping[str, Any]


def facts(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the facts about this process, without loading MPI.

    Of those that a reader may not guess: `processes` is the number in MPI's world (0 without one); `trouble` is why MPI
    could not be loaded; `threads` is the size of XLA's pool if it was set (0: one thread per core of `cpus`); `limited`
    is whether JAX leaves room for other ranks in a GPU's memory; `tasks` is the number of tasks of the Slurm job if
    they were not started; `load` is the mean number of processes that ran or wanted to run in the last minute.
    """
    started, threads = launcher(environ), chosen_threads(environ)
    devices, why = _devices()
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": next((int(environ[name]) for name in _RANKS if environ.get(name, "").isdigit()), 0) if started else 0,
        "launcher": started.name if started else "",
        "processes": 0,
        "library": "",
        "trouble": "",
        "survives": False,
        "cpus": sorted(allowed_cpus()),
        "logical": os.cpu_count() or 1,
        "quota": cpu_quota(),
        "threads": int(threads) if threads.isdigit() else 0,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        "devices": devices,
        "no_devices": why,
        "gpus": len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]),
        "visible": environ.get("CUDA_VISIBLE_DEVICES", ""),
        "limited": any(name in environ for name in _LIMITS),
        "platforms": environ.get("JAX_PLATFORMS", ""),
        "python": platform.python_version(),
        "versions": _versions(),
        "code": adaptive.__version__,
        "intruder": intruder(),
        "tasks": tasks_not_started(environ),
    }


def _devices() -> tuple[list[str], str]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else a second rank on a GPU would fail
    import jax

    try:
        found = jax.local_devices()
    except RuntimeError as error:
        return [], " ".join(str(error).split())
    return [d.platform if d.platform == "cpu" else f"{d.device_kind} ({d.platform}:{d.id})" for d in found], ""


def _versions() -> dict[str, str]:
    found = {}
    for name in (*PACKAGES, *PLUGINS):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if name in PACKAGES:
                found[name] = "missing"
    return found
