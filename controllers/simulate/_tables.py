"""Runs of several policies on one scenario, and tables of them."""

from __future__ import annotations

from collections.abc import Sequence

from ._scenarios import Scenario
from ._simulation import Hooked, Simulation
from ._simulation import simulate as simulated


def compare(case: Scenario, policies: dict[str, Hooked], steps: int, seed: int = 0) -> dict[str, Simulation]:
    """Run policies on one scenario, all under the same noise.

    Args:
      case: the scenario.
      policies: by name.
      steps: number of steps.
      seed: of the noise.

    Returns:
      The simulations, by policy.
    """
    return {
        name: simulated([*case.before, hook], case.cluster, case.global_batch, steps, seed=seed)
        for name, hook in policies.items()
    }


def table(runs: dict[str, Simulation]) -> str:
    """Format the runs of one scenario as a Markdown table. Compares times up to the examples that all runs processed.

    Args:
      runs: by policy; the first is the baseline. With a reserve, the table has columns for the mean number of workers,
        the worker-seconds and the goodput (`Simulation.goodput`).
    """
    examples = min(int(run.global_batch.sum()) for run in runs.values())
    base = next(iter(runs))
    counted = any(run.cluster is not None and run.cluster.first is not None for run in runs.values())
    more = ("workers", "worker-s", "goodput") if counted else ()
    rows: list[tuple[str, ...]] = [
        ("policy", "mean step", "best split", "over best", "adjustments", f"speed-up over {base}", *more)
    ]
    for name, run in runs.items():
        took, best = run.step_seconds.mean(), run.ideal_seconds.mean()
        gain = runs[base].seconds_to(examples) / run.seconds_to(examples)
        cells = (name, _ms(took), _ms(best), f"{took / best:.3f}", str(len(run.adjustments)), f"{gain:.2f}")
        spent = (f"{run.workers.mean():.1f}", f"{run.worker_seconds:.4g}", f"{run.goodput:.4g}") if counted else ()
        rows.append((*cells, *spent))
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells as a Markdown table; the first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    body = [rows[0], rule, *rows[1:]]
    cells = [
        [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))] for r in body
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"
