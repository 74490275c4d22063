"""What `adaptive doctor` learns of a process and of its job, as plain data that can be sent as JSON."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import adaptive
from adaptive.base.process.cores import allowed_cpus, chosen_threads
from adaptive.base.process.launcher import launcher, tasks_not_started
from launchers.command import intruder
from launchers.ending import LAUNCHER
from launchers.resources import cpu_quota, gpus_here, number_in

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint", "mpi4py", "adaptive-dataflow")
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_LIMITS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", LAUNCHER)  # which share a GPU's memory
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")

Facts = Mapping[str, Any]


def facts(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the facts about this process, without loading MPI.

    Of those that a reader may not guess: `trouble` is why MPI could not be loaded; `threads` is the size of XLA's pool
    if it was set, else 0; `limited` is whether JAX leaves room for other ranks in a GPU's memory; `tasks` is the number
    of tasks of the Slurm job if they were not started.
    """
    started, threads = launcher(environ), chosen_threads(environ)
    return {
        "host": socket.gethostname(),
        "rank": (started and number_in(environ, _RANKS)) or 0,
        "launcher": started.name if started else "",
        "library": "",
        "trouble": "",
        "survives": False,
        "cpus": sorted(allowed_cpus()),
        "logical": os.cpu_count() or 1,
        "quota": cpu_quota(),
        "threads": int(threads) if threads.isdigit() else 0,
        **_devices(),
        "gpus": gpus_here(),
        "visible": environ.get("CUDA_VISIBLE_DEVICES", ""),
        "limited": any(name in environ for name in _LIMITS),
        "platforms": environ.get("JAX_PLATFORMS", ""),
        "versions": {"python": platform.python_version(), **dict.fromkeys(PACKAGES, "missing"), **_installed()},
        "code": adaptive.__version__,
        "intruder": intruder(),
        "tasks": tasks_not_started(environ),
    }


def _devices() -> dict[str, Any]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else a second rank on a GPU would fail
    import jax

    try:
        found = jax.local_devices()
    except RuntimeError as error:
        return {"devices": [], "no_devices": " ".join(str(error).split())}
    names = [d.platform if d.platform == "cpu" else f"{d.device_kind} ({d.platform}:{d.id})" for d in found]
    return {"devices": names, "no_devices": ""}


def _installed() -> dict[str, str]:
    found = {}
    for name in (*PACKAGES, *PLUGINS):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
