"""The charts of a report: which there are, and those of seconds and of metrics."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .batch_charts import batch_sizes, global_batch, layer_noise
from .canvas import PARTS, ROOM, Canvas, Chart, Key, room_for
from .columns import Columns
from .formatting import counted, duration, number
from .layers import is_of_layers
from .worker_charts import busy_times, time_shares, waiting_times

LONGEST = "#808080"  # color of the longest step of a bin


def charts(run: Columns) -> list[Chart]:
    """Return the charts for which the record has data.

    Raises:
      Missing: bokeh is not installed.
    """
    return [chart for chart in _all(Canvas(run)) if chart is not None]


def _all(canvas: Canvas) -> Iterator[Chart | None]:
    """Yield the charts in the order of the report; `None` for those without data."""
    for draw in (step_seconds, time_shares, waiting_times, busy_times, batch_sizes, global_batch):
        yield draw(canvas)
    yield from layer_noise(canvas)
    for name in canvas.run.metrics:
        yield metric(canvas, name)


def step_seconds(canvas: Canvas) -> Chart | None:
    """Draw the seconds per step, stacked by cause."""
    run, bins = canvas.run, canvas.bins
    longest = bins.most(run.seconds)
    mean = bins.mean(run.seconds)
    top = room_for(mean) if len(mean) < 20 else max(room_for(mean), ROOM * float(np.percentile(longest, 90)))
    figure = canvas.over_steps("milliseconds a step", 1e3 * top)
    line = {"line_color": LONGEST, "line_width": 1}
    if run.breakdown is None:
        source = canvas.source(mean=1e3 * mean, longest=1e3 * longest)
        drawn = figure.line("x", "mean", source=source, line_color=PARTS["computing"], line_width=2)
        if bins.counts.max() > 1:
            figure.line("x", "longest", source=source, **line)
        canvas.hover(figure, [drawn], [("mean", "@mean{0,0.00} ms"), ("longest", "@longest{0,0.00} ms")])
        key: tuple[Key, ...] = (Key("a step", PARTS["computing"]),)
    else:
        shares = bins.mean(run.breakdown)
        order = [part for part in PARTS if part in run.parts] + [part for part in run.parts if part not in PARTS]
        columns = {part: 1e3 * shares[:, run.parts.index(part)] for part in order}
        source = canvas.source(**columns, longest=1e3 * longest)
        colors = [PARTS.get(part, "#333333") for part in order]
        if len(bins.begins) == 1:
            figure.vbar_stack(order, x="x", width=0.8, color=colors, source=source)
        else:
            figure.varea_stack(order, x="x", color=colors, source=source)
        drawn = figure.line("x", "longest", source=source, **line) if bins.counts.max() > 1 else None
        drawn = drawn or figure.line("x", "longest", source=source, line_alpha=0)
        lines = [(part, f"@{part}{{0,0.00}} ms") for part in reversed(order)]
        canvas.hover(figure, [drawn], [*lines, ("longest step", "@longest{0,0.00} ms")])
        key = tuple(map(Key, order, colors))
    key += (Key("longest step", LONGEST),) * bool(bins.counts.max() > 1)
    above = int((run.seconds > top).sum())
    note = f"{above:,} of {len(run):,} steps are longer than the chart is high." if above else ""
    typical, most = duration(float(np.median(run.seconds))), duration(float(run.seconds.max()))
    says = f"A step took {typical} in the median, {most} at most."
    title = "Seconds per step" + ", by cause" * (run.breakdown is not None)
    return Chart("seconds", title, says, figure, key, (note + canvas.points_note).strip())


def metric(canvas: Canvas, name: str) -> Chart | None:
    """Draw one of the driver's metrics: median and range of each bin."""
    run, bins = canvas.run, canvas.bins
    if is_of_layers(name, canvas.layers):
        return None  # they have a chart of their own
    values = np.where(np.isfinite(run.metrics[name]), run.metrics[name], np.nan)
    if not np.isfinite(values).any() or any(
        np.allclose(values, s[:, 0], 1e-4, equal_nan=True) for s in run.noise.values()
    ):
        return None  # no numbers, or a noise scale, which has a chart with its bounds
    known = values[np.isfinite(values)]
    low, high = np.percentile(known, [0.5, 99.5]) if len(known) > 50 else (known.min(), known.max())
    logarithmic = bool(known.min() > 0 and high > 50 * max(low, 1e-300))
    figure = canvas.over_steps(name, y_axis_type="log" if logarithmic else "linear")
    if logarithmic:
        canvas.logarithmic(figure, low / 1.5, 1.5 * high)
    else:
        room = 0.08 * (high - low) or 0.5 * abs(high) or 1.0
        figure.y_range = canvas.models.Range1d(low - room, high + room)
    middle, least, most = bins.middle(values), bins.least(values), bins.most(values)
    source = canvas.source(middle=middle, least=least, most=most)
    key: tuple[Key, ...] = (Key(name, "#0072B2"),)
    if bins.counts.max() > 1:
        figure.varea("x", "least", "most", source=source, fill_color="#0072B2", fill_alpha=0.22)
        key = Key("median", "#0072B2"), Key("from the least to the most", "#B3D4E8")
    drawn = figure.line("x", "middle", source=source, line_color="#0072B2", line_width=1.8)
    canvas.hover(figure, [drawn], [(name.replace("@", ""), "@middle{0,0.0000}")])
    lost = int((~np.isfinite(run.metrics[name])).sum())
    first, last, lowest, highest = (number(float(f)) for f in (known[0], known[-1], known.min(), known.max()))
    says = f"{name} went from {first} to {last}; the least was {lowest}, the most {highest}."
    note = f"{counted(lost, 'step')} had no number (NaN or infinite)." if lost else ""
    return Chart(
        f"metric-{list(run.metrics).index(name)}", name, says, figure, key, (note + canvas.points_note).strip()
    )
