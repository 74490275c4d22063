"""Users' arrays on the host, in the width in which JAX computes, without loss of values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .torch_tensors import is_tensor, numpy_of_tensor

_KINDS = {"U": "text", "T": "text", "S": "bytes", "M": "times", "m": "times"}  # by numpy's kinds
# The dtypes that need no narrowing, with and without x64 mode.
_NARROW = frozenset(
    map(np.dtype, ("?", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32", "complex64"))
)
_PLAIN = (np.ndarray, float, int, bool, *{np.dtype(c).type for c in np.typecodes["AllInteger"] + "fde?"})


class NotAnArrayError(ValueError):
    """A value that cannot be converted to an array of numbers. The message has no subject; `about` adds one.

    Args:
      why: a sentence whose subject is the array, or the element at `index`.
      index: of the element that is the reason; empty if the whole array is.
    """

    def __init__(self, why: str, index: tuple[int, ...] = ()):
        super().__init__(why)
        self.index = index

    def about(self, name: str, rows: Sequence[int] | np.ndarray | None = None) -> str:
        """Return the message with a name: `data['x'][7, 2] holds 1e+40, which …`.

        Args:
          name: of the array.
          rows: the numbers in the data set of the array's rows; by default they are numbered from 0.
        """
        index = self.index if rows is None or not self.index else (int(rows[self.index[0]]), *self.index[1:])
        at = f"[{', '.join(map(str, index))}]" if index else ""
        return f"{name}{at} {self}"


def is_key(value: Any) -> bool:
    """Return whether `value`, an array or a `ShapeDtypeStruct`, holds PRNG keys."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or isinstance(dtype, np.dtype):
        return False
    try:
        return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    except TypeError:  # another library's dtype, which numpy does not know
        return False


def numbers_of(value: Any) -> np.ndarray:
    """Return a JAX array or a number as a numpy array; PRNG keys as their key data."""
    return np.asarray(jax.random.key_data(value) if is_key(value) else value)


def is_array(value: Any) -> bool:
    """Return whether `value` is an array or converts to one as a whole (numpy, JAX, pandas, torch, bytes).

    Includes sparse matrices, which `on_host` refuses.
    """
    known = isinstance(value, bytes | bytearray | memoryview | np.generic) or hasattr(type(value), "__array__")
    return known or is_sparse(value)


def is_sparse(value: Any) -> bool:
    """Return whether `value` is a sparse matrix; JAX's are pytrees, too."""
    return _sparse_advice(type(value)) is not None  # type: ignore[arg-type]  # mypy: a class is not hashable


@lru_cache(maxsize=1024)
def _sparse_advice(cls: type) -> str | None:
    """Return how a sparse matrix (of scipy, JAX or pydata) becomes dense, as code; `None` for any other class."""
    modules = {c.__module__ for c in cls.__mro__}
    if hasattr(cls, "toarray") and any(m.startswith("scipy.sparse") for m in modules):
        return "x.toarray()"
    sparse = any(m == "sparse" or m.startswith(("sparse.", "jax.experimental.sparse")) for m in modules)
    return "x.todense()" if sparse and hasattr(cls, "todense") else None


def as_jax(value: Any) -> jax.Array:
    """Return `value` as a JAX array; PyTorch's tensors too, as constants that have no gradient.

    Raises:
      NotAnArrayError: a PyTorch tensor cannot be converted.
    """
    return jnp.asarray(as_numpy(value) if is_tensor(value) else value)


def check_not_sharded(value: Any) -> None:
    """Raise if an array is sharded over devices. Replicated arrays pass.

    Raises:
      NotAnArrayError: the array is sharded.
    """
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer) or value.is_fully_replicated:
        return
    spec = getattr(value.sharding, "spec", None)
    how = f"NamedSharding, {spec}" if spec is not None else type(value.sharding).__name__
    raise NotAnArrayError(
        f"is sharded over {len(value.sharding.device_set)} devices ({how}). A worker computes on one device, and needs "
        "all of it there, unless it is a mesh:  comm.world(mesh=mesh). If the array fits on one device, gather it:  "
        + (
            "np.asarray(x)"
            if value.is_fully_addressable
            else "jax.experimental.multihost_utils.process_allgather(x, tiled=True)"
        )
    )


def on_host(value: Any) -> np.ndarray:
    """Return a value as a numpy array in the width in which JAX computes; without a copy if possible.

    Raises:
      NotAnArrayError: the value holds no numbers, or numbers that don't fit that width, or is sharded over devices.
    """
    array = as_numpy(value)
    if array.dtype in _NARROW:
        return array
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return array if dtype == array.dtype else _narrowed(array, dtype)


def as_numpy(value: Any) -> np.ndarray:
    """Return a value as a numpy array of its own dtype, in native byte order; without a copy if possible.

    Raises:
      NotAnArrayError: the value holds no numbers, or numbers of a dtype that JAX lacks, or is sharded over devices.
    """
    if type(value) in _PLAIN:
        array = np.asarray(value)
    elif is_tensor(value):
        try:
            array = numpy_of_tensor(value)
        except ValueError as error:
            raise NotAnArrayError(str(error)) from error
    else:
        array = _as_array(value)
    if array.dtype in _NARROW:
        return array
    if not _are_numbers(array.dtype):
        raise _no_numbers(array)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _as_array(value: Any) -> np.ndarray:
    """Convert a value of any other class."""
    check_not_sharded(value)
    if isinstance(value, np.ma.MaskedArray):
        return _unmasked(value)
    if is_key(value):
        raise NotAnArrayError(
            "holds PRNG keys. Pass their data, jax.random.key_data(keys), and restore the keys in the driver:  "
            "jax.random.wrap_key_data(x)"
        )
    advice = _sparse_advice(type(value))  # type: ignore[arg-type]
    if advice is not None:
        raise NotAnArrayError(f"is a sparse matrix ({type(value).__name__}). Pass {advice}.")
    try:
        return np.asarray(value)
    except Exception as error:  # whatever the library it comes from says
        raise NotAnArrayError(f"cannot be read as an array: {error}") from error


def _unmasked(array: np.ma.MaskedArray) -> np.ndarray:
    """Return a masked array without masked elements as an array."""
    masked = np.argwhere(np.ma.getmaskarray(array))
    if len(masked):
        raise NotAnArrayError(
            "is masked, and the mask would be lost. Pass x.filled(0), and x.mask as another leaf.",
            tuple(masked[0].tolist()),
        )
    return array.data


def _no_numbers(array: np.ndarray) -> NotAnArrayError:
    """Return the error for an array that doesn't hold numbers."""
    if array.dtype.kind != "O":
        what = _KINDS.get(array.dtype.kind, f"elements of {array.dtype}")
        return NotAnArrayError(f"holds {what}, which JAX does not have; it must be an array of numbers.")
    for index, element in np.ndenumerate(array):
        if isinstance(element, str | bytes):
            return NotAnArrayError(f"holds {'text' if isinstance(element, str) else 'bytes'}, {element!r:.40}.", index)
        if element is None:
            return NotAnArrayError(f"holds None. {GIVE_A_MASK}", index)
    first = next(array.flat, None)
    what = type(first).__name__
    if isinstance(first, np.ndarray | list | tuple):
        return NotAnArrayError(
            f"holds Python objects, as arrays of different lengths are ({what}). {PAD_THEM} If all have one shape, "
            "np.stack(x)."
        )
    return NotAnArrayError(f"holds Python objects (the first is {what}); it must be an array of numbers.")


PAD_THEM = "Examples must have the same shapes: pad them, and add a leaf with a mask of the valid numbers."
GIVE_A_MASK = "Put a number in its place, such as 0, and add a leaf with a mask of the valid numbers."


@lru_cache
def _are_numbers(dtype: np.dtype) -> bool:
    if dtype.kind in "fc" and dtype.itemsize > (8 if dtype.kind == "f" else 16):
        return False
    return dtype.kind == "b" or jnp.issubdtype(dtype, np.number)


def _narrowed(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return an array in a narrower dtype. Raises a NotAnArrayError if a number does not fit it."""
    if array.dtype.kind in "iu":
        _check_integers(array, dtype)
        return array.astype(dtype)
    if array.ndim == 0 and array.dtype.kind == "f" and -1e38 < array.item() < 1e38:
        return array.astype(dtype)  # at once, since np.errstate takes longer than all the rest
    try:
        with np.errstate(over="raise"):  # numbers that are infinite already overflow nowhere
            return array.astype(dtype)
    except FloatingPointError:
        with np.errstate(over="ignore"):
            narrow = array.astype(dtype)
        parts = ((narrow.real, array.real), (narrow.imag, array.imag))
        lost = np.argwhere(np.logical_or(*(~np.isfinite(n) & np.isfinite(a) for n, a in parts)))
        raise _too_large(array, dtype, tuple(lost[0].tolist())) from None


def _check_integers(array: np.ndarray, dtype: np.dtype) -> None:
    if not array.size:
        return
    if array.ndim == 0 and dtype.kind == "i" and -(2**31) <= array.item() < 2**31:
        return  # the common case, of a source's labels
    range_ = np.iinfo(dtype)
    if int(array.min()) < range_.min or int(array.max()) > range_.max:
        outside = np.argwhere((array < range_.min) | (array > range_.max))
        raise _too_large(array, dtype, tuple(outside[0].tolist()))


def _too_large(array: np.ndarray, dtype: np.dtype, index: tuple[int, ...]) -> NotAnArrayError:
    return NotAnArrayError(
        f"holds {array[index].item()!r}, which {dtype} cannot: JAX computes in 32 bits by default. To use 64 bits:  "
        "jax.config.update('jax_enable_x64', True)",
        index,
    )
