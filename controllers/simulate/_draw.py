"""The plot of a comparison: seconds per step and batch sizes, one row per policy. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ._simulation import Simulation

BLUE, GREY, INK = "#2a6fbb", "#b9bec6", "#30343b"
MANY = 16  # largest number of workers that are drawn as separate lines


def draw(simulations: Mapping[str, Simulation], path: str | Path, title: str = "") -> None:
    """Write a plot with a row per policy: seconds of each step relative to the best split, and batch sizes.

    Args:
      simulations: simulations of clusters, for which the best split is known, by policy.
      path: the image file; its suffix determines the format.
      title: title of the plot.

    Raises:
      RuntimeError: matplotlib is not installed.
    """
    figure = new_figure(9.0, 0.7 + 1.45 * len(simulations))
    rows = figure.subplots(len(simulations), 2, sharex=True, squeeze=False, width_ratios=(1.25, 1))
    tallest = max(float(np.quantile(_smooth(s.step_seconds), 0.995)) for s in simulations.values())
    unit, per = ("ms", 1e3) if tallest < 2 else ("s", 1.0)
    for (left, right), (name, simulation) in zip(rows, simulations.items(), strict=True):
        _seconds(left, simulation, per)
        left.set_ylim(0, 1.12 * tallest * per)
        left.set_title(f"{name}:  {_summary(simulation)}", loc="left", fontsize=8.5, color=INK)
        _sizes(right, simulation)
    rows[0, 1].set_ylabel("examples per worker", fontsize=8)
    for left, right in rows[-1:]:
        left.set_xlabel("step", fontsize=8)
        right.set_xlabel("step", fontsize=8)
    rows[0, 0].legend(loc="upper right", ncols=3, fontsize=7, frameon=False, borderpad=0)
    rows[0, 0].set_ylabel(f"{unit} per step", fontsize=8)
    if title:
        figure.suptitle(title, fontsize=10, x=0.01, ha="left", color=INK)
    figure.savefig(path, dpi=110)


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of a size in inches, without using pyplot's global state.

    Raises:
      RuntimeError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            "drawing needs matplotlib, which is not installed:  pip install 'adaptive-dataflow[examples]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def tidy(axes: Any) -> None:
    """Apply a plain style: no frame at the top and right, small gray ticks, a light grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(labelsize=7, color=GREY, length=2.5)
    axes.grid(axis="y", color="#eceef1", linewidth=0.7)
    axes.set_axisbelow(True)


def _seconds(axes: Any, simulation: Simulation, per: float) -> None:
    steps = np.arange(1, len(simulation.step_seconds) + 1)
    took, best = simulation.step_seconds * per, simulation.ideal_seconds * per
    axes.plot(steps, took, color=BLUE, alpha=0.35, linewidth=0.6)
    axes.plot(steps, _smooth(took), color=BLUE, linewidth=1.3, label="as it is")
    axes.plot(steps, _smooth(best), color=INK, linewidth=1.0, linestyle=(0, (3, 2)), label="best split")
    adjusted = simulation.adjustments
    if len(adjusted):
        axes.plot(adjusted, np.zeros(len(adjusted)), "|", color=INK, ms=5, mew=0.7, clip_on=False, label="adjustments")
    axes.set_xlim(1, len(steps))
    tidy(axes)


def _sizes(axes: Any, simulation: Simulation) -> None:
    from matplotlib import colormaps

    steps = np.arange(1, len(simulation.sizes) + 1)
    sizes = np.where(simulation.sizes > 0, simulation.sizes, np.nan)
    order = np.argsort(np.nan_to_num(sizes[-1]))
    n = len(order)
    colors = colormaps["viridis"](np.linspace(0.05, 0.9, n))
    for color, worker in zip(colors, order, strict=True):
        axes.plot(
            steps, sizes[:, worker], color=color, linewidth=1.1 if n <= MANY else 0.5, alpha=1 if n <= MANY else 0.6
        )
    axes.set_ylim(bottom=0)
    tidy(axes)


def _summary(simulation: Simulation) -> str:
    over = simulation.step_seconds.sum() / simulation.ideal_seconds.sum()
    count = len(simulation.adjustments)
    return f"{over:.3f} × best, {count} adjustment{'s' * (count != 1)}"


def _smooth(values: np.ndarray, window: int = 5) -> np.ndarray:
    """Return the running median. The unsmoothed values are drawn as a pale line behind it."""
    if len(values) < 2 * window:
        return values
    padded = np.pad(values, window // 2, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, window), axis=-1)
