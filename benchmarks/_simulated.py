"""Shared by the simulated reproductions: medians over seeds and batch sizes as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def middle(values: Iterable[float], digits: int = 2, unit: str = "") -> str:
    """Format the median of several seeds, with the minimum and maximum where they differ."""
    low, mid, high = np.percentile(list(values), [0, 50, 100])
    texts = [f"{value:.{digits}f}" for value in (low, mid, high)]
    return f"{texts[1]}{unit}" if texts[0] == texts[2] else f"{texts[1]}{unit} ({texts[0]} – {texts[2]})"


def sizes_text(sizes: Sequence[int] | np.ndarray) -> str:
    """Format batch sizes as `166+167+159+20`."""
    return "+".join(str(int(size)) for size in sizes)
