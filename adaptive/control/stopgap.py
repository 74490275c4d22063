"""Batch sizes for the steps after a loss, until the kernels of larger local batches are compiled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def stopgap(
    total: int, sizes: Sequence[int], wanted: Sequence[int], upper: Sequence[int], *, splittable: bool
) -> tuple[int, ...] | None:
    """Return sizes that the remaining workers can compute with the kernels of their last step.

    Each worker takes a multiple of its last size, as several microbatches, so that the sizes sum to `total`, or to as
    much of it as such multiples can. `None` if a worker has had no examples.

    Args:
      total: the global batch.
      sizes: of the last step; shape=(capacity,).
      wanted: the sizes for which kernels may be missing, which sum to `total`; 0 for workers without examples.
      upper: the largest local batches.
      splittable: whether a local batch may run as several microbatches.
    """
    unit = np.where(np.asarray(wanted) > 0, sizes, 0)
    if np.any((np.asarray(wanted) > 0) & (unit == 0)) or unit.sum() > total:
        return None
    taken = unit.copy()
    while splittable:
        fits = (unit > 0) & (unit <= total - taken.sum()) & (taken + unit <= np.asarray(upper))
        if not fits.any():
            break
        last = fits & (unit == total - taken.sum())
        fits = last if last.any() else fits
        load = np.where(fits, (taken + unit) / np.maximum(wanted, 1), np.inf)  # relative to the worker's share
        worker = int(np.argmin(load))
        taken[worker] += unit[worker]
    return tuple(taken.tolist())
