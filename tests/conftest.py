"""JAX on four CPU devices, and strict where flax and optax allow it; Hypothesis draws alike every time."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # for this process, and for those that tests start

import hypothesis
import jax

from tests.mpirun import mpirun_version

jax.config.update("jax_num_cpu_devices", 4)  # before any backend is used: workers of a DeviceWorld
# A sum of (n,) and (n, 1) is most often a bug. Strict dtype promotion is out of reach: optax multiplies int by float.
jax.config.update("jax_numpy_rank_promotion", "raise")

# No deadline: the first example often compiles something.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)
hypothesis.settings.load_profile("suite")


def pytest_report_header() -> list[str]:
    names = ("jax", "jaxlib", "flax", "optax", "numpy", "mpi4py")
    return [", ".join(f"{name} {_version(name)}" for name in names), f"mpirun: {mpirun_version()}"]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"
