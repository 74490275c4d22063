"""Which differences between two trials are rounding errors.

Trials are computed in double precision, in which a difference of 100 units in the last place of single precision is far
above rounding, but for values that cancel. So rounding errors are also measured, element by element: inputs are
perturbed by one unit in the last place, and changes of the size that this causes do not count.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ROUNDING = 100  # the default tolerance, relative to an element, in units in the last place of the driver's precision
_MULTIPLE = 100  # tolerance, as a multiple of the effect of perturbed inputs
_NOISY = 0.03  # a value with a larger relative rounding error cannot be compared
_OF_LARGEST = 4 * float(np.finfo(np.float64).eps)  # tolerance relative to a leaf's largest element


def beyond(gaps: np.ndarray, value: np.ndarray, allowed: np.ndarray, floor: Any) -> float | None:
    """Return the difference of two arrays relative to their value, over the elements that differ.

    Args:
      gaps, value: absolute differences of elements, and their magnitudes.
      allowed: tolerance of each element.
      floor: measured rounding error of each element, or 0.

    Returns:
      `None` if all differences may be rounding.
    """
    value, allowed = (np.where(np.isfinite(x), x, 0.0) for x in (value, allowed))
    off = gaps > allowed + _OF_LARGEST * value.max(initial=0.0) + _MULTIPLE * floor
    return norm(gaps[off]) / (norm(value[off]) or 1.0) if off.any() else None


def is_noisy(value: np.ndarray, floor: Any) -> bool:
    """Return whether rounding errors are too large to recognize a difference."""
    return norm(np.asarray(floor)) > _NOISY * norm(value)


def differences(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the absolute differences of elements; infinite where only one of the two is finite."""
    with np.errstate(all="ignore"):
        gaps = np.abs(in_double(a) - in_double(b))
    gaps = np.where((a == b) | ((a != a) & (b != b)), 0.0, gaps)
    return np.where(np.isfinite(gaps), gaps, np.inf)


def in_double(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def is_finite(x: np.ndarray) -> bool:
    return not np.issubdtype(x.dtype, np.inexact) or bool(np.isfinite(x).all())


def norm(x: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        return float(np.linalg.norm(in_double(x).reshape(-1)))
