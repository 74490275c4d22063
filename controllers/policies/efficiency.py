"""Noise scales as policies read them, and the statistical efficiency that follows from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from adaptive import DriverError
from controllers.timing.seconds import shape_of


class Bounds(NamedTuple):
    """A noise scale in examples, with its confidence bounds; NaN while not known."""

    scale: float
    lower: float
    upper: float

    @property
    def known(self) -> bool:
        """Whether there are measurements."""
        return self.scale >= 0 and self.lower >= 0 and self.upper >= 0  # False for NaN


def read_noise(value: Any, policy: str) -> Bounds:
    """Return a hook's value as a noise scale: an object with fields `scale`, `lower` and `upper`, or a number, whose
    bounds are equal to it.

    Not known while the object's `signal` is not positive: its scale is then a lower bound, and does not say how large
    the noise is.
    """
    try:
        if hasattr(value, "scale"):
            if not float(getattr(value, "signal", 1.0)) > 0:
                return Bounds(math.nan, math.nan, math.nan)
            scale = float(value.scale)
            return Bounds(scale, float(getattr(value, "lower", scale)), float(getattr(value, "upper", scale)))
        return Bounds(*[float(value)] * 3)
    except (TypeError, ValueError):
        raise _no_noise(value, policy) from None


def check_noise(values: Sequence[Any], n_workers: int, policy: str) -> None:
    """Check that the hook's first value can be a noise scale; used as policies' `check`."""
    del n_workers
    value = values[0] if values else None
    numbers = [getattr(value, field) for field in Bounds._fields if hasattr(value, field)] or [value]
    if value is None or any(math.prod(shape_of(x)) != 1 or isinstance(x, tuple | list | dict) for x in numbers):
        raise _no_noise(value, policy)


def _no_noise(value: Any, policy: str) -> DriverError:
    got = f"a {type(value).__name__}" if shape_of(value) == () else f"an array of shape {shape_of(value)}"
    return DriverError(
        f"{policy} reads a noise scale; it received {'nothing' if value is None else got}. Write:\n"
        f"    noise = mon.noise_scale(grads, avg_grads)\n"
        f"    ctrl.hook(ctrl.{policy}(), noise)"
    )


def efficiency(noise_scale: float, batch: float, base: float = 1.0) -> float:
    """Return the statistical efficiency of a batch size: an example's contribution, relative to a batch of size `base`.

        (noise + base) / (noise + batch)

    References:
      McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", eq. 2.7; Qiao et al. 2021, "Pollux", eq. 6.
    """
    if math.isinf(noise_scale):
        return 1.0
    return (noise_scale + base) / (noise_scale + batch)


def efficiency_cap(noise_scale: float, base: float, least: float) -> float:
    """Return the largest batch whose statistical efficiency relative to `base` is at least `least` (0 … 1)."""
    if math.isinf(noise_scale):
        return math.inf
    return (noise_scale + base) / least - noise_scale


def round_batch(target: float, multiple: int, least: int, most: int) -> int:
    """Return the multiple between two bounds nearest to `target`; the nearest integer if there is no such multiple."""
    first, last = -(-least // multiple), most // multiple
    if first > last:
        return int(min(max(target, least), most))
    return int(min(max(round(min(target / multiple, last)), first), last)) * multiple
