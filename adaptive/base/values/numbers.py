"""Conversion of numbers that users pass: Python's, numpy's and JAX's; text that looks like a number is refused."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def whole(value: Any) -> int | None:
    """Return `value` as an integer, or `None` if it isn't one.

    Accepts integers of any size, scalar arrays, and floats and fractions with an integer value; not booleans, text or
    tracers.
    """
    number = _scalar(value)
    try:
        return None if number is None or int(number) != number else int(number)
    except (ValueError, OverflowError):  # NaN, infinite
        return None


def real(value: Any) -> float | None:
    """Return `value` as a float, or `None` if it isn't a real number. Integers out of range become infinite."""
    number = _scalar(value)
    try:
        return None if number is None else float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
    except ValueError:  # a signaling NaN, of decimals
        return math.nan


def reals(values: Any) -> np.ndarray | None:
    """Return real numbers as an array of floats of the same shape, or `None` if `values` aren't real numbers."""
    array = _as_array(values)
    if array is None:
        return None
    if array.dtype == object:
        each = [real(value) for value in array.flat]
        return None if None in each else np.array(each, float).reshape(array.shape)
    is_real = jnp.issubdtype(array.dtype, jnp.integer) or jnp.issubdtype(array.dtype, jnp.floating)
    return array.astype(float) if is_real else None


def truths(values: Any) -> np.ndarray | None:
    """Return booleans as a boolean array, or `None` if `values` aren't booleans. Numbers aren't."""
    array = _as_array(values)
    return array if array is not None and array.dtype == np.bool_ else None


def _as_array(values: Any) -> np.ndarray | None:
    """Return values as a numpy array, or `None` if they are traced or no array: ragged lists, or PRNG keys."""
    if isinstance(values, jax.core.Tracer):
        return None
    try:
        return np.asarray(values)
    except (TypeError, ValueError):
        return None


def _scalar(value: Any) -> Any:
    """Return a scalar as a Python number, or `None`."""
    if isinstance(value, bool | jax.core.Tracer):
        return None
    if hasattr(value, "dtype"):
        array = reals(value)
        if array is None or array.ndim:
            return None
        return int(value) if np.asarray(value).dtype.kind in "iu" else float(array)  # a float does not hold all int64
    return value if isinstance(value, numbers.Number) and not isinstance(value, complex) else None
