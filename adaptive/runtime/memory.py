"""Access to the memory of arrays, and the release of freed memory."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from adaptive.base.arrays import is_key, numbers_of


def memory_of(leaf: jax.Array) -> np.ndarray:
    """Return an array that shares a leaf's memory, to write into; a new array if the leaf is not on the host in numpy's
    layout.

    Only for arrays to which nothing else refers and which no computation reads meanwhile, because JAX assumes that
    arrays are immutable. The result is valid as long as `leaf` is.
    """
    if not is_key(leaf):
        seen = np.asarray(leaf)
        if seen.size and leaf.unsafe_buffer_pointer() == seen.ctypes.data and seen.flags.c_contiguous:
            bytes_ = (ctypes.c_char * seen.nbytes).from_address(seen.ctypes.data)
            return np.frombuffer(memoryview(bytes_), seen.dtype).reshape(seen.shape)
    return np.empty_like(numbers_of(leaf), order="C")


def return_freed_memory() -> bool:
    """Return free pages of the C library's heap to the system. Returns whether that is possible: only with glibc.

    By itself glibc returns only memory at the top of its heap. Arrays up to 32 MiB (`M_MMAP_THRESHOLD`, which adapts)
    are allocated on the heap, where one small object can keep hundreds of free MiB below it: memory of compilers, and
    of gradients of several microbatches. A call takes milliseconds, in which other threads may wait to allocate, and
    pages must be mapped again later. So it is not called in every step.
    """
    libc = _glibc()
    if libc is None:
        return False
    libc.malloc_trim(0)
    return True


@lru_cache(maxsize=1)
def _glibc() -> Any:
    """Return the C library if it has `malloc_trim`, else None."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if hasattr(libc, "malloc_trim") else None
