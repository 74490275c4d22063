"""What differs between two recorded runs: in words, and one chart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .about import about, differences
from .canvas import Chart, Key, bokeh_modules
from .columns import Columns
from .downsample import Bins
from .formatting import counted, duration, number

_NOTABLE = 0.02  # of the time for an example; smaller differences of causes are left out
_COLORS = ("#0072B2", "#D55E00")
_AT_THE_END = 0.02  # of the run's steps, over which a metric's median is its value at the end


class RunDifference(NamedTuple):
    """One difference between two runs.

    Attributes:
      what: what differs.
      first, second: of the first and the second run.
      meaning: the difference, in words; "" if the two values say all.
    """

    what: str
    first: str
    second: str
    meaning: str = ""


def compare(a: Columns, b: Columns) -> list[RunDifference]:
    """Return what differs between two runs: speed, where the time of an example goes, metrics after the same number of
    examples, what happened, and what the runs were made with.
    """
    made_with = [RunDifference(*row) for row in differences(about(a), about(b))]
    found = [*_speed(a, b), *_causes(a, b), *_metrics(a, b), *_events(a, b), *made_with]
    return [difference for difference in found if difference.first != difference.second]


def in_words(found: Sequence[RunDifference]) -> str:
    """Return differences as lines of text."""
    wide = max((len(d.what) for d in found), default=0) + 2
    lines = [f"{d.what:<{wide}}{d.first} → {d.second}{f'   {d.meaning}' if d.meaning else ''}" for d in found]
    return "\n".join(lines) or "Nothing differs that the records have."


def _speed(a: Columns, b: Columns) -> list[RunDifference]:
    rates = [float(run.examples[-1] / max(run.elapsed[-1], 1e-12)) for run in (a, b)]
    ratio = rates[1] / rates[0]
    steps = [float(np.median(run.seconds)) for run in (a, b)]
    faster = f"{ratio:.2f} times as fast" if ratio >= 1 else f"{1 / ratio:.2f} times as slow"
    return [
        RunDifference("examples a second", number(rates[0]), number(rates[1]), faster),
        RunDifference("median step", duration(steps[0]), duration(steps[1])),
    ]


def _causes(a: Columns, b: Columns) -> list[RunDifference]:
    """Compare the seconds of a thousand examples by cause, the largest difference first."""
    if a.breakdown is None or b.breakdown is None:
        return []
    first, second = _per_thousand(a), _per_thousand(b)
    names = [*first, *(name for name in second if name not in first)]
    changes = {name: second.get(name, 0.0) - first.get(name, 0.0) for name in names}
    least = _NOTABLE * sum(first.values())
    order = sorted((name for name in names if abs(changes[name]) >= least), key=lambda name: -abs(changes[name]))
    return [
        RunDifference(
            f"{name} of 1,000 examples",
            duration(first.get(name, 0.0)),
            duration(second.get(name, 0.0)),
            f"{'+' if changes[name] > 0 else '−'}{duration(abs(changes[name]))}",
        )
        for name in order
    ]


def _per_thousand(run: Columns) -> dict[str, float]:
    assert run.breakdown is not None
    totals = run.breakdown.sum(0, dtype=np.float64) * 1e3 / max(int(run.examples[-1]), 1)
    return dict(zip(run.parts, map(float, totals), strict=True))


def _metrics(a: Columns, b: Columns) -> list[RunDifference]:
    """Compare metrics, and the time in steps, after as many examples as the shorter run has."""
    common = min(int(a.examples[-1]), int(b.examples[-1]))
    rows = [min(int(np.searchsorted(run.examples, common)), len(run) - 1) for run in (a, b)]
    after = f"after {counted(common, 'example')}"
    took = [duration(float(run.elapsed[row])) for run, row in zip((a, b), rows, strict=True)]
    found = [RunDifference(f"time {after}", *took)]
    many = max(1, int(_AT_THE_END * min(len(a), len(b))))
    for name in (name for name in a.metrics if name in b.metrics):
        values = [_up_to(run.metrics[name], row, many) for run, row in zip((a, b), rows, strict=True)]
        if not np.allclose(values[0], values[1], rtol=1e-6, equal_nan=True):
            found.append(RunDifference(f"{name} {after}", number(values[0]), number(values[1])))
    return found


def _up_to(values: np.ndarray, row: int, many: int) -> float:
    """Return the median of a metric's last values up to a row; NaN if all of these are."""
    last = values[max(0, row + 1 - many) : row + 1]
    known = last[np.isfinite(last)]
    return float(np.median(known)) if len(known) else float("nan")


def _events(a: Columns, b: Columns) -> list[RunDifference]:
    counts = [
        {
            "workers at the end": len(run.members[-1][1]) if run.members else run.n,
            "global batch at the end": int(run.changed[-1].sum()),
            "changes of batch sizes": len(run.changes) - 1,
            "steps with a loss": sum(bool(notice.lost) for notice in run.notices),
            "skipped steps": int(run.skipped.sum()),
            "restores": sum(restored.restores for restored in run.restored),
        }
        for run in (a, b)
    ]
    pairs = [(name, counts[0][name], counts[1][name]) for name in counts[0]]
    return [RunDifference(name, f"{first:,}", f"{second:,}") for name, first, second in pairs if first != second]


def chart(runs: Sequence[Columns], names: Sequence[str]) -> Chart:
    """Draw the first metric that both runs have over the time in steps; without one, examples a second.

    Args:
      runs: the two runs.
      names: what they are called.

    Raises:
      Missing: bokeh is not installed.
    """
    _, plotting = bokeh_modules()
    metric = next((name for name in runs[0].metrics if name in runs[1].metrics), None)
    label = metric or "examples a second"
    figure: Any = plotting.figure(
        height=360, sizing_mode="stretch_width", x_axis_label="seconds in steps", y_axis_label=label,
        tools="xpan,box_zoom,xwheel_zoom,reset,save,hover", active_drag="box_zoom", output_backend="canvas",
    )  # fmt: skip
    figure.toolbar.logo = None
    figure.background_fill_color = figure.border_fill_color = figure.outline_line_color = None
    for run, color, dash in zip(runs, _COLORS, ("solid", "dashed"), strict=True):
        bins = Bins.of(len(run))
        rate = run.global_batch / np.maximum(run.seconds, 1e-9)
        values = bins.middle(run.metrics[metric] if metric else rate)
        figure.line(run.elapsed[bins.last], values, line_color=color, line_width=2, line_dash=dash)
    key = tuple(Key(name, color, dash) for name, color, dash in zip(names, _COLORS, ("solid", "dashed"), strict=True))
    return Chart("compared", f"{label} over the time in steps", "", figure, key)
