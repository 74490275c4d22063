"""Which differences between two trials are rounding errors.

In double precision, 100 units in the last place of single precision are far above rounding, but for values that cancel.
So rounding errors are also measured, by element: inputs are perturbed by one unit in the last place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from adaptive.base.values.arrays import is_key

_OF_LARGEST = 4 * float(np.finfo(np.float64).eps)  # tolerance relative to a leaf's largest element


def beyond(gaps: np.ndarray, value: np.ndarray, allowed: np.ndarray) -> float | None:
    """Return the differences `gaps` relative to `value`, over the elements that differ by more than is `allowed`;
    `None` if all may be rounding.
    """
    value, allowed = (np.where(np.isfinite(x), x, 0.0) for x in (value, allowed))
    off = gaps > allowed + _OF_LARGEST * value.max(initial=0.0)
    return norm(gaps[off]) / (norm(value[off]) or 1.0) if off.any() else None


def differences(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the absolute differences of elements; infinite where only one of the two is finite."""
    with np.errstate(all="ignore"):
        gaps = np.abs(in_double(a) - in_double(b))
    gaps = np.where((a == b) | ((a != a) & (b != b)), 0.0, gaps)
    return np.where(np.isfinite(gaps), gaps, np.inf)


def in_double(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def norm(x: Any) -> float:
    with np.errstate(all="ignore"):
        return float(np.linalg.norm(in_double(np.asarray(x)).reshape(-1)))


def nudged(value: Any, rng: np.random.Generator, *, whole: bool) -> Any:
    """Perturb each number by up to two units in the last place. Random keys and arrays of whole numbers, such as
    labels, stay; if `whole`, of the latter only those with one element do, such as counters.
    """
    if is_key(value):
        return value
    x = np.asarray(value)
    if not np.issubdtype(x.dtype, np.inexact) or (np.array_equal(x, np.round(x)) and (not whole or x.size == 1)):
        return value
    eps = np.finfo(x.dtype).eps * rng.uniform(-2, 2, x.shape)
    return np.where(x == 0, np.abs(eps), x * (1 + eps)).astype(x.dtype)
