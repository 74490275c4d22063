"""Which differences between two trials are rounding errors.

The tolerance follows from the precisions of the driver and of the trials. For each leaf it is also measured: inputs are
perturbed by one unit in the last place, and changes of the size that this causes do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adaptive.graph.plan import Plan

from .influence import Influence, Place
from .trials import Output, Result, outputs_of
from .widen import SINGLE

_MULTIPLE = 16  # tolerance, as a multiple of the effect of perturbed inputs
_NOISY = 0.03  # a value with a larger relative rounding error cannot be compared
_OF_ELEMENT = 100  # tolerance of a single element, as a multiple of the same
_OF_LARGEST = 4  # smaller differences are ignored; in units in the last place of a leaf's largest element
_SINGLE_EPS = float(np.finfo(SINGLE).eps)


class Precisions:
    """Machine epsilon for every contribution and output: of the driver's lowest precision on the path to it (at most
    single), and of the precision of the trials.
    """

    def __init__(self, plan: Plan, influence: Influence, outputs: Sequence[Output], driver: Plan):
        given = influence if driver is plan else Influence(driver)
        self._same = given.places == influence.places
        self._driver, self._plan, self._given, self._influence = driver, plan, given, influence
        atoms = [o.atom for o in outputs]
        theirs = [o.atom for o in outputs_of(driver)]
        self.outputs = [self._both(given.of(t).eps, influence.of(a).eps) for a, t in zip(atoms, theirs, strict=True)]

    def of_place(self, place: Place) -> tuple[float, float]:
        """Return a contribution's two epsilons: the driver's, and that of the trials."""
        level, i = place
        computed = self._influence.carried(self._plan.messages[level][i]).eps
        own = self._given.carried(self._driver.messages[level][i]).eps if self._same else _SINGLE_EPS
        return self._both(own, computed)

    def _both(self, own: float, computed: float) -> tuple[float, float]:
        return max(computed, min(own, _SINGLE_EPS)), computed


@dataclass
class RoundingErrors:
    """The largest change of each element by rounding, in the trials so far; by contribution, and by output's index."""

    contributions: dict[Place, np.ndarray] = field(default_factory=dict)
    outputs: dict[int, np.ndarray] = field(default_factory=dict)

    def add(self, a: Result, b: Result, *, outputs: bool = True) -> None:
        """Add the differences of two trials that differ by rounding alone. `outputs`: also those of the outputs."""
        for place, value in a.contributions.items():
            _raise_each(self.contributions, place, differences(value, b.contributions[place]))
        for k, value in enumerate(a.outputs if outputs else ()):
            _raise_each(self.outputs, k, differences(value, b.outputs[k]))


def _raise_each(found: dict, key: Any, values: np.ndarray) -> None:
    found[key] = np.maximum(values, found[key]) if key in found else values


def beyond(
    gaps: np.ndarray,
    value: np.ndarray,
    allowed: np.ndarray,
    precisions: tuple[float, float],
    floor: np.ndarray | None,
    *,
    by_element: bool,
) -> float | None:
    """Return the difference of two arrays relative to their value; `None` if it may be rounding.

    Args:
      gaps, value: absolute differences of elements, and their magnitudes.
      allowed: tolerance of each element in the driver's own precision.
      precisions: machine epsilon of the driver's own precision, and of the precision of the trials.
      floor: measured rounding error of each element; `None` if not measured.
      by_element: whether single elements are compared, or only the norm.
    """
    own, computed = precisions
    noise = 0.0 if floor is None else _MULTIPLE * norm(floor)
    if np.isinf(gaps).any() and np.isfinite(noise):
        return np.inf
    if norm(gaps) > max(norm(allowed), noise):
        return norm(gaps) / (norm(value) or 1.0)
    if not by_element or not gaps.size:
        return None
    least: Any = _OF_LARGEST * computed * float(value.max())
    if floor is not None:
        # In a higher precision than the driver's, each element has its own tolerance.
        least = least + (_OF_ELEMENT * floor if computed < own else _MULTIPLE * float(floor.max()))
    off = gaps > allowed + least
    return float((gaps[off] / np.where(value[off] > 0, value[off], 1.0)).max()) if off.any() else None


def is_noisy(gaps: np.ndarray, value: np.ndarray, allowed: float, floor: np.ndarray) -> bool:
    """Return whether rounding errors are too large to recognize a difference."""
    return norm(gaps) > allowed * norm(value) and norm(floor) > _NOISY * norm(value)


def differences(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the absolute differences of elements; infinite where only one of the two is finite."""
    with np.errstate(all="ignore"):
        gaps = np.abs(in_double(a) - in_double(b))
    gaps = np.where((a == b) | ((a != a) & (b != b)), 0.0, gaps)
    return np.where(np.isfinite(gaps), gaps, np.inf)


def apart(a: np.ndarray, b: np.ndarray) -> float:
    """Return the norm of the difference of two arrays."""
    return norm(differences(a, b))


def in_double(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def is_finite(x: np.ndarray) -> bool:
    return not np.issubdtype(x.dtype, np.inexact) or bool(np.isfinite(x).all())


def norm(x: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        return float(np.linalg.norm(in_double(x).reshape(-1)))


def rms(x: np.ndarray) -> float:
    return norm(x) / max(1, x.size) ** 0.5
