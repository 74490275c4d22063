"""Ahead-of-time compilation of functions for given devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import jax
from jax.sharding import Sharding

from adaptive.base.process.thread_status import thread_status
from adaptive.base.values.ambient import current_settings, without_debug_checks

from .cache import one_compiles


@thread_status("compiling", compiles=True)
def compile_segment(
    function: Callable,
    shapes: Sequence[Any],
    device: jax.Device,
    *,
    name: str = "segment",
    donate: int = 0,
    results: list[Sharding] | None = None,
) -> Callable:
    """Compile a function ahead of time for a device or a mesh, and return the program.

    Args:
      function: a function of pytrees of arrays. Its `__name__` is set.
      shapes: shapes of its arguments, with their shardings.
      device: the device, or the first one of the mesh.
      name: the name in profiles, after "jit_".
      donate: the number of arguments, from the first on, whose memory may be reused for results.
      results: the shardings of its results.
    """
    function.__name__ = name  # of the program; not by a wrapper, because JAX traces a function once for all devices
    # Unused arguments are kept: each segment is given all that it is said to read.
    jitted = jax.jit(function, donate_argnums=tuple(range(donate)), keep_unused=True, out_shardings=results)
    lowered = jitted.lower(*shapes)
    # A program over devices of several processes is compiled by all of them together, without waiting.
    is_common = not all(x.sharding.is_fully_addressable for x in jax.tree.leaves(tuple(shapes)))
    with nullcontext() if is_common else one_compiles(name):
        return lowered.compile(compiler_options=compiler_options(device))


def compiler_options(device: jax.Device) -> dict[str, str | bool] | None:
    """Return XLA's options for programs of this library, which processes compile each in its own order: by default the
    compilers of GPUs share their tuning between the processes of `jax.distributed`, and wait for each other.
    """
    return {"xla_gpu_shard_autotuning": False} if device.platform == "gpu" and jax.process_count() > 1 else None


@thread_status("compiling", compiles=True)
def side_by_side(jobs: Sequence[Callable[[], object]], most: int) -> None:
    """Run jobs that compile, in at most `most` threads, and wait for all. Raises the first job's error that failed."""
    if most == 1 or len(jobs) <= 1:
        for job in jobs:
            job()
        return
    settings = current_settings()

    def there(job: Callable[[], object]) -> None:
        with settings():
            job()

    with ThreadPoolExecutor(min(most, len(jobs)), "adaptive-start") as threads:
        for done in [threads.submit(without_debug_checks(there), job) for job in jobs]:
            done.result()
