"""PyTorch's `TensorDataset`, whose tensors are read as columns, with the same examples as `dataset[i]`."""

from __future__ import annotations

from typing import Any

import numpy as np


def has_columns(dataset: Any) -> bool:
    """Return whether `dataset` is a `TensorDataset`, or a `Subset` of one.

    Returns False for derived classes, whose `__getitem__` may differ.
    """
    return _is(dataset, "TensorDataset") or (_is(dataset, "Subset") and has_columns(dataset.dataset))


def columns_of(dataset: Any) -> tuple[Any, ...]:
    """Return the tensors of a data set that has columns; for a `Subset`, copies of its rows."""
    if _is(dataset, "TensorDataset"):
        return tuple(dataset.tensors)
    indices = np.asarray(dataset.indices)
    return tuple(column[indices] for column in columns_of(dataset.dataset))


def _is(value: Any, name: str) -> bool:
    return type(value).__name__ == name and type(value).__module__ == "torch.utils.data.dataset"
