"""Makes compiling cheaper for the suite: XLA's results are kept in `.pytest_cache/`, and MLIR's contexts are shared.

Compiling the same few thousand small programs takes a quarter of the suite's time. A folder is named for everything
that changes what XLA writes: the versions, the flags, and the instructions of this processor.
"""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_ALL = ROOT / ".pytest_cache" / "compilations"  # `make site` deletes .cache
_KEPT = 3  # folders: those of two Pythons, and one of `make test-all`
_PROGRAMS = 200  # of one MLIR context, which keeps all types and constants that it has met


def cache() -> dict[str, str]:
    """Return environment variables for a compilation cache that the next run finds again; delete all but a few."""
    folder = _ALL / _key()
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    for old in sorted(_ALL.iterdir(), key=lambda path: path.stat().st_mtime)[:-_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def _key() -> str:
    cpu = Path("/proc/cpuinfo")
    flags = (
        next((line for line in cpu.read_text().splitlines() if line.startswith("flags")), "") if cpu.exists() else ""
    )
    facts = (
        sys.version,
        platform.machine(),
        flags,
        os.environ.get("XLA_FLAGS", ""),
        (ROOT / "constraints.txt").read_text(),
    )
    return sha256("\n".join(facts).encode()).hexdigest()[:16]


def share_contexts() -> None:
    """Lower many programs in one MLIR context.

    JAX makes a context with all dialects for each program, which takes 9 ms: longer than lowering most programs of the
    suite. Contexts are safe to share between threads, as JAX gives them a pool of threads.
    """
    from jax._src.interpreters import mlir

    make, held, lowered = mlir.make_ir_context, [], itertools.count()

    def shared() -> Any:
        if next(lowered) % _PROGRAMS == 0 or not held:
            held[:] = [make()]
        return held[0]

    mlir.make_ir_context = shared
