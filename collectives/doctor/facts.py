"""What `adaptive doctor` learns of a process and of its job, as plain data that can be sent as JSON."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from typing import Any

import numpy as np

import adaptive
from adaptive.base.process.cores import allowed_cpus, chosen_threads
from adaptive.base.process.launcher import launcher, tasks_not_started
from launchers.command import intruder
from launchers.ending import LAUNCHER
from launchers.resources import cpu_quota, gpus_here, number_in

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint", "mpi4py", "adaptive-dataflow")
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
CHUNK_BYTES = 1 << 20  # many times what a shaper lets through at once
MOST_PAIRS = 120  # of hosts: all of 16, and of more hosts each with its neighbors
_LIMITS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", LAUNCHER)  # which share a GPU's memory
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")

Facts = Mapping[str, Any]


def facts(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the facts about this process, without loading MPI.

    Of those that a reader may not guess: `processes` is the number in MPI's world (0 without one); `trouble` is why MPI
    could not be loaded; `threads` is the size of XLA's pool if it was set (0: one thread per core of `cpus`); `limited`
    is whether JAX leaves room for other ranks in a GPU's memory; `tasks` is the number of tasks of the Slurm job if
    they were not started.
    """
    started = launcher(environ)
    devices, why = _devices()
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": (started and number_in(environ, _RANKS)) or 0,
        "launcher": started.name if started else "",
        "processes": 0,
        "library": "",
        "trouble": "",
        "survives": False,
        "cpus": sorted(allowed_cpus()),
        "logical": os.cpu_count() or 1,
        "quota": cpu_quota(),
        "threads": int(threads) if (threads := chosen_threads(environ)).isdigit() else 0,
        "devices": devices,
        "no_devices": why,
        "gpus": gpus_here(),
        "visible": environ.get("CUDA_VISIBLE_DEVICES", ""),
        "limited": any(name in environ for name in _LIMITS),
        "platforms": environ.get("JAX_PLATFORMS", ""),
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
    found = {"python": platform.python_version(), **dict.fromkeys(PACKAGES, "missing")}
    for name in (*PACKAGES, *PLUGINS):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def host_pairs(comm: Any, hosts: Sequence[str]) -> list[dict[str, Any]]:
    """Measure the bandwidth between each two hosts, in bytes per second and in each direction at once. All ranks call
    this together; `hosts`: the host of each rank.
    """
    leaders = {host: hosts.index(host) for host in dict.fromkeys(hosts)}
    pairs = sorted(combinations(leaders, 2), key=lambda pair: abs(leaders[pair[0]] - leaders[pair[1]]))[:MOST_PAIRS]
    found = []
    sent, received = np.zeros(CHUNK_BYTES, np.uint8), np.zeros(CHUNK_BYTES, np.uint8)
    for a, b in pairs:
        comm.Barrier()
        if comm.rank in (leaders[a], leaders[b]):
            other, took = leaders[b] if comm.rank == leaders[a] else leaders[a], []
            for _ in range(4):  # the fastest counts: other work on a host only adds time
                start = time.perf_counter()
                comm.Sendrecv(sent, other, recvbuf=received, source=other)
                took.append(time.perf_counter() - start)
            if comm.rank == leaders[a]:
                found.append({"hosts": [a, b], "bandwidth": CHUNK_BYTES / max(min(took), 1e-9)})
    return [pair for of_rank in comm.allgather(found) for pair in of_rank]
