"""The CPU cores that this process may use, and the thread count set by the user."""

from __future__ import annotations

import os
from collections.abc import Mapping


def allowed_cpus() -> frozenset[int]:
    """Return the numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def chosen_threads(environ: Mapping[str, str] = os.environ) -> str:
    """Return the size of XLA's thread pool as set in the environment; "" if unset.

    Only these two flags limit it. The often recommended XLA_FLAGS="--xla_cpu_multi_thread_eigen=false
    intra_op_parallelism_threads=1" does not: with JAX 0.10 it left a matrix product on 1.9 of 2 cores, as without;
    PJRT_NPROC=1 brought it to 1.0.
    """
    return environ.get("PJRT_NPROC") or environ.get("NPROC") or ""


def n_cores() -> int:
    """Return the number of cores for this process: at most its number of threads, if that is set."""
    allowed, chosen = len(allowed_cpus()), chosen_threads()
    return min(allowed, int(chosen)) if chosen.isdigit() and int(chosen) else allowed
