"""Arrays as users give them, taken to the host: as wide as JAX computes, with nothing lost on the way."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_KINDS = {"O": "Python objects", "U": "text", "S": "bytes", "M": "times", "m": "times"}  # by numpy's kinds


class NotAnArrayError(ValueError):
    """Something cannot be made an array of numbers; says why, with no name for it."""


def is_key(value: Any) -> bool:
    """Whether `value`, an array or its shape and dtype, is of PRNG keys, whose elements are no numbers."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def numbers_of(value: Any) -> np.ndarray:
    """An array of JAX's, or a number, on the host; keys as the numbers that they are made of."""
    return np.asarray(jax.random.key_data(value) if is_key(value) else value)


def is_array(value: Any) -> bool:
    """Whether `value` is an array, or can be read as one as a whole: of numpy, JAX, pandas, torch, h5py, or bytes."""
    return isinstance(value, bytes | bytearray | memoryview | np.generic) or hasattr(type(value), "__array__")


def check_not_sharded(value: Any) -> None:
    """Raise if an array is divided over devices. One that every device has all of is fine.

    Raises:
      NotAnArrayError: it is sharded.
    """
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer) or value.is_fully_replicated:
        return
    spec = getattr(value.sharding, "spec", None)
    how = f"NamedSharding, {spec}" if spec is not None else type(value.sharding).__name__
    raise NotAnArrayError(
        f"is sharded over {len(value.sharding.device_set)} devices ({how}). A worker computes on one device, and needs "
        "all of it there. Sharding within a worker is not supported. If the array fits on one device, gather it:  "
        + (
            "np.asarray(x)"
            if value.is_fully_addressable
            else "jax.experimental.multihost_utils.process_allgather(x, tiled=True)"
        )
    )


def on_host(value: Any) -> np.ndarray:
    """A numpy array, in the width that JAX computes with; the same memory where it is so wide already.

    Raises:
      NotAnArrayError: it holds no numbers, or numbers that are wider than that; or it is sharded over devices.
    """
    check_not_sharded(value)
    if isinstance(value, np.ma.MaskedArray):
        raise NotAnArrayError("is a masked array, whose mask would be lost. Give x.filled(0), and x.mask beside it.")
    if is_key(value):
        raise NotAnArrayError(
            "holds PRNG keys. Give what they are made of, jax.random.key_data(keys), and make keys of it in the "
            "driver:  jax.random.wrap_key_data(x)"
        )
    try:
        array = np.asarray(value)
    except Exception as error:  # whatever the library it comes from says
        raise NotAnArrayError(f"cannot be read as an array: {error}") from error
    if not _are_numbers(array.dtype):
        if array.dtype.names:
            raise NotAnArrayError(
                f"is a structured array. Give its fields:  {{name: x[name] for name in {list(array.dtype.names)}}}"
            )
        what = _KINDS.get(array.dtype.kind, f"elements of {array.dtype}")
        raise NotAnArrayError(f"holds {what}; it must be an array of numbers.")
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype == array.dtype:
        return array
    _check_range(array, dtype)
    return array.astype(dtype)


@lru_cache
def _are_numbers(dtype: np.dtype) -> bool:
    return dtype.kind == "b" or jnp.issubdtype(dtype, np.number)


def _check_range(array: np.ndarray, dtype: np.dtype) -> None:
    """Raise where integers would be wrapped around."""
    if array.dtype.kind not in "iu" or not array.size:
        return
    if array.ndim == 0 and -(2**31) <= array < 2**31 and dtype.kind == "i":
        return  # the common case, of a source's labels
    range_, extremes = np.iinfo(dtype), (int(array.min()), int(array.max()))
    for value in extremes:
        if not range_.min <= value <= range_.max:
            raise NotAnArrayError(
                f"holds {value}, which {dtype} cannot: JAX computes in 32 bits unless told otherwise, by "
                "jax.config.update('jax_enable_x64', True)."
            )
