"""The memory of arrays that nobody else has."""

from __future__ import annotations

import ctypes

import jax
import numpy as np

from adaptive.base.arrays import is_key, numbers_of


def memory_of(leaf: jax.Array) -> np.ndarray:
    """An array to write into, of the leaf's shape: the leaf's own memory, where that lies on the host as numpy would
    have it, so that it then holds what is written. Else new memory.

    For arrays that nobody else has, and no computation is going to read meanwhile: JAX takes what an array holds for
    settled. The result is good for as long as `leaf` is.
    """
    if not is_key(leaf):
        seen = np.asarray(leaf)
        if seen.size and leaf.unsafe_buffer_pointer() == seen.ctypes.data and seen.flags.c_contiguous:
            bytes_ = (ctypes.c_char * seen.nbytes).from_address(seen.ctypes.data)
            return np.frombuffer(memoryview(bytes_), seen.dtype).reshape(seen.shape)
    return np.empty_like(numbers_of(leaf), order="C")
