"""Ranks of one host share what they compile: JAX's persistent compilation cache, where the user has not set one up."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import jax

_MIN_COMPILE_SECONDS = 0.1  # reading an entry back takes 20 ms


def share_compilations() -> None:
    """Switch the cache on for this process, in a folder of this host's own.

    Does nothing where a folder is configured already, or the cache is switched off (`JAX_ENABLE_COMPILATION_CACHE=0`).
    Kernels for CPUs hold instructions of the very machine, so hosts that share a home do not share entries.
    """
    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:
        return
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "adaptive-dataflow" / platform.node()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # no home to write to: then every rank compiles for itself
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)


def in_turn(rungs: Sequence[int], rank: int, ranks: int) -> list[int]:
    """The order in which one of several ranks compiles what all of them need: a part that is its own first, and then
    what the others will have put into the cache by that time.
    """
    ranks = max(1, min(ranks, len(rungs)))
    own = list(rungs[rank % ranks :: ranks])
    return own + [r for r in rungs if r not in own]
