"""Shared by the simulated reproductions: medians over seeds as text, colors of policies, and figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from _measure import RESULTS

from controllers.simulate._draw import INK, new_figure, tidy

COLORS = {
    "equal": "#9aa0a8",
    "static": "#7b5ea7",
    "published": "#c8553d",
    "proportional": "#e0a030",
    "stepping": "#3b8f5a",
    "balance": "#2a6fbb",
}


def middle(values: Iterable[float], digits: int = 2, unit: str = "") -> str:
    """Format the median of several seeds, with the minimum and maximum where they differ."""
    low, mid, high = np.percentile(list(values), [0, 50, 100])
    texts = [f"{value:.{digits}f}" for value in (low, mid, high)]
    return f"{texts[1]}{unit}" if texts[0] == texts[2] else f"{texts[1]}{unit} ({texts[0]} – {texts[2]})"


def sizes_text(sizes: Sequence[int] | np.ndarray) -> str:
    """Format batch sizes as `166+167+159+20`."""
    return "+".join(str(int(size)) for size in sizes)


def panels(width: float, height: float, rows: int, columns: int) -> tuple[Any, np.ndarray]:
    """Return a figure and its axes, shape=(rows, columns), without frames."""
    figure = new_figure(width, height)
    axes = figure.subplots(rows, columns, squeeze=False)
    for one in axes.flat:
        tidy(one)
    return figure, axes


def label(axes: Any, title: str, x: str, y: str) -> None:
    """Set the title and the labels of axes."""
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)


def save(figure: Any, name: str) -> None:
    """Write a figure to the results."""
    figure.savefig(RESULTS / name, dpi=110)
