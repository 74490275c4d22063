"""The suite runs JAX on four CPU devices, and strict where flax and optax allow it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import jax

from tests.mpirun import mpirun_version

jax.config.update("jax_num_cpu_devices", 4)  # before any backend is used: workers of a DeviceWorld
jax.config.update("jax_numpy_rank_promotion", "raise")  # (n,) + (n, 1) is most often a bug


def pytest_report_header() -> list[str]:
    names = ("jax", "jaxlib", "flax", "optax", "numpy", "mpi4py")
    return [", ".join(f"{name} {_version(name)}" for name in names), f"mpirun: {mpirun_version()}"]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"
