"""Runs of several policies on one scenario, and tables and plots of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ._scenarios import Scenario
from ._simulation import Hooked, Simulation
from ._simulation import simulate as simulated


def compare(case: Scenario, policies: dict[str, Hooked], steps: int, seed: int = 0) -> dict[str, Simulation]:
    """Run policies on one scenario, all under the same noise. Returns the simulations by policy."""
    return {
        name: simulated([*case.before, hook], case.cluster, case.global_batch, steps, seed=seed)
        for name, hook in policies.items()
    }


def table(runs: dict[str, Simulation]) -> str:
    """Format runs by policy as a Markdown table, up to the examples that all processed; the first is the baseline."""
    examples = min(int(run.global_batch.sum()) for run in runs.values())
    base = next(iter(runs))
    counted = any(run.cluster is not None and run.cluster.first is not None for run in runs.values())
    judged = counted and not np.isnan(runs[base].goodput)  # it needs a noise scale
    more = (("workers", "worker-s") if counted else ()) + (("goodput",) if judged else ())
    rows: list[tuple[str, ...]] = [
        ("policy", "mean step", "best split", "over best", "adjustments", f"speed-up over {base}", *more)
    ]
    for name, run in runs.items():
        took, best = run.step_seconds.mean(), run.ideal_seconds.mean()
        gain = runs[base].seconds_to(examples) / run.seconds_to(examples)
        cells = (name, _ms(took), _ms(best), f"{took / best:.3f}", str(len(run.adjustments)), f"{gain:.2f}")
        spent = (f"{run.workers.mean():.1f}", f"{run.worker_seconds:.4g}", f"{run.goodput:.4g}")
        rows.append((*cells, *spent[: len(more)]))
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells as a Markdown table; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for first, *others in (rows[0], rule, *rows[1:]):
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append(f"| {' | '.join([first.ljust(widths[0]), *cells])} |")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def draw(runs: dict[str, Simulation], path: Path, title: str = "") -> None:
    """Write a plot with a row per policy: seconds of each step, and batch sizes. A RuntimeError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            "drawing needs matplotlib, which is not installed:  pip install 'adaptive-dataflow[examples]'"
        ) from error
    figure = Figure(figsize=(9.0, 0.7 + 1.5 * len(runs)), layout="constrained")
    figure.suptitle(title, fontsize=10)
    tallest = 1e3 * max(float(np.quantile(run.step_seconds, 0.995)) for run in runs.values())
    axes = figure.subplots(len(runs), 2, sharex=True, squeeze=False)
    for (left, right), (name, run) in zip(axes, runs.items(), strict=True):
        steps = np.arange(1, len(run.sizes) + 1)
        left.plot(steps, 1e3 * run.step_seconds, linewidth=0.8, label="as it is")
        left.plot(steps, 1e3 * run.ideal_seconds, "k--", linewidth=0.8, label="best split")
        left.set(ylim=(0, 1.1 * tallest), ylabel="ms per step")
        over, count = run.step_seconds.sum() / run.ideal_seconds.sum(), len(run.adjustments)
        left.set_title(f"{name}: {over:.3f} × best, {count} adjustments", loc="left", fontsize=9)
        right.plot(steps, np.where(run.sizes > 0, run.sizes, np.nan), linewidth=0.8)
        right.set(ylim=(0, None), ylabel="examples")
    left.set_xlabel("step")
    right.set_xlabel("step")
    left.legend(loc="lower right", fontsize=7)
    figure.savefig(path, dpi=110)
