"""Charts of batch sizes, and of the noise scales that they may follow."""

from __future__ import annotations

import numpy as np

from .canvas import BAND, DASHES, FEW, LINES, PARTS, ROOM, Canvas, Chart, Key
from .downsample import corners
from .findings import medians
from .formatting import number
from .layers import is_of_layers


def batch_sizes(canvas: Canvas) -> Chart | None:
    """Draw the batch size of each worker, or minimum, median and maximum of more than `FEW` workers."""
    run = canvas.run
    if run.n < 2:
        return None
    figure = canvas.over_steps("examples", ROOM * max(float(run.changed.max()), 1.0))
    title, end = "Batch size of each worker", len(run) - 1
    if run.n > FEW:
        there = np.where(run.changed > 0, run.changed.astype(float), np.nan)
        bounds = np.fmin.reduce(there, 1), np.fmax.reduce(there, 1)
        repeats = np.diff(np.append(run.changes, len(run)))
        least, most = (
            f(np.repeat(b, repeats)) for f, b in zip((canvas.bins.least, canvas.bins.most), bounds, strict=True)
        )
        middle = canvas.bins.middle(np.repeat(medians(there, 1), repeats))
        source = canvas.source(least=least, middle=middle, most=most)
        figure.varea("x", "least", "most", source=source, fill_color=PARTS["computing"], fill_alpha=0.3)
        drawn = figure.line("x", "middle", source=source, line_color=PARTS["computing"], line_width=1.8)
        lines = [(name, f"@{name}{{0,0}} examples") for name in ("most", "middle", "least")]
        canvas.hover(figure, [drawn], lines)
        return Chart("sizes", title, "", figure, BAND, canvas.points_note.strip())
    key = tuple(Key(f"worker {w}", LINES[w], DASHES[w % len(DASHES)]) for w in range(run.n))
    for w, (_, color, dash) in enumerate(key):
        rows, sizes = corners(run.changes, run.changed[:, w], end)
        figure.step(run.step[rows], sizes, mode="after", line_color=color, line_dash=dash, line_width=1.8)
    columns = {f"worker_{w}": run.sizes[canvas.bins.last, w] for w in range(run.n)}
    canvas.hover_alone(figure, columns, [(k.name, f"@worker_{w}{{0,0}} examples") for w, k in enumerate(key)])
    return Chart("sizes", title, "", figure, key)


def global_batch(canvas: Canvas) -> Chart | None:
    """Draw the global batch, with the noise scale and its bounds if they are recorded."""
    run = canvas.run
    rows, sizes = corners(run.changes, run.changed.sum(1), len(run) - 1)
    known = {name: scale for name, scale in run.noise.items() if np.isfinite(scale[:, 0]).any()}
    scales = {name: scale for name, scale in known.items() if not is_of_layers(name, canvas.layers)}
    if not scales:
        figure = canvas.over_steps("examples", ROOM * float(max(sizes.max(), 1)))
        figure.step(run.step[rows], sizes, mode="after", line_color="#0072B2", line_width=2)
        batch = {"batch": run.global_batch[canvas.bins.last]}
        canvas.hover_alone(figure, batch, [("global batch", "@batch{0,0} examples")])
        return Chart("batch", "Global batch", "", figure, (Key("global batch", "#0072B2"),))
    figure = canvas.over_steps("examples", y_axis_type="log")
    key = [Key("global batch", "#0072B2")]
    low, high = [float(max(sizes.min(), 1))], [float(max(sizes.max(), 1))]
    for place, (name, scale) in enumerate(scales.items()):
        middle = canvas.bins.middle(scale[:, 0])
        positive = middle[middle > 0]
        low += [float(np.percentile(positive, 1))] if len(positive) else []
        high += [float(positive.max())] if len(positive) else []
        color = ("#D55E00", "#009E73", "#CC79A7")[place % 3]
        lower, upper = (canvas.bins.middle(scale[:, i]) for i in (1, 2))
        above = 1e3 * max(high)  # infinite bounds lie outside the chart
        columns = {
            "middle": np.where(middle > 0, middle, np.nan),
            "lower": np.maximum(np.nan_to_num(lower, nan=1e-3), 1e-3),
            "upper": np.where(np.isinf(upper), above, np.nan_to_num(upper, nan=above)),
            "at_least": _in_words(lower),
            "at_most": _in_words(upper),
            "batch": run.global_batch[canvas.bins.last],
        }
        source = canvas.source(**columns)
        figure.varea("x", "lower", "upper", source=source, fill_color=color, fill_alpha=0.18)
        drawn = figure.line("x", "middle", source=source, line_color=color, line_width=1.8)
        lines = [("global batch", "@batch{0,0}"), (_called(name), "@middle{0,0.0}")]
        lines += [("at least", "@at_least"), ("at most", "@at_most")]
        canvas.hover(figure, [drawn], lines)
        key += [Key(_called(name), color), Key("its bounds", f"{color}40")]
    figure.step(run.step[rows], sizes, mode="after", line_color="#0072B2", line_width=2, line_dash="solid")
    canvas.logarithmic(figure, min(low) / 2, 2 * max(high))
    figure.yaxis.formatter = canvas.models.NumeralTickFormatter(format="0,0.[0000]")
    note = (
        "Where the noise scale is far above the global batch, twice the batch is worth almost twice the step; "
        f"where it is far below, almost nothing.{canvas.points_note}"
    )
    return Chart("batch", "Global batch and noise scale", "", figure, tuple(key), note)


def layer_noise(canvas: Canvas) -> list[Chart]:
    """Draw the noise scales of layers, one chart for each value that holds them, with a line for each layer."""
    return [chart for root, scales in canvas.layers.items() if (chart := _noise_of(canvas, root, scales)) is not None]


def _noise_of(canvas: Canvas, root: str, scales: dict[str, np.ndarray]) -> Chart | None:
    middle = {layer: canvas.bins.middle(np.where(scale > 0, scale, np.nan)) for layer, scale in scales.items()}
    known = np.concatenate([values[np.isfinite(values)] for values in middle.values()])
    if not len(known):
        return None
    figure = canvas.over_steps("examples", y_axis_type="log")
    canvas.logarithmic(figure, float(np.percentile(known, 1)) / 2, 2 * float(known.max()))
    source = canvas.source(**{f"layer_{place}": values for place, values in enumerate(middle.values())})
    styles = [(LINES[i % FEW], DASHES[i // FEW % len(DASHES)]) for i in range(len(middle))]
    key = tuple(Key(layer, *style) for layer, style in zip(middle, styles, strict=True))
    drawn = [
        figure.line("x", f"layer_{i}", source=source, line_color=k.color, line_dash=k.dash, line_width=1.8)
        for i, k in enumerate(key)
    ]
    canvas.hover(figure, drawn[:1], [(k.name, f"@layer_{i}{{0,0.0}} examples") for i, k in enumerate(key)])
    last = {layer: values[np.isfinite(values)][-1] for layer, values in middle.items() if np.isfinite(values).any()}
    low, high = min(last, key=lambda name: last[name]), max(last, key=lambda name: last[name])
    says = f"At the end it was least for {low}, {number(last[low])}, and most for {high}, {number(last[high])}."
    return Chart(f"layers-{root}", f"Noise scale by layer: {root}", says, figure, key, canvas.points_note.strip())


def _called(name: str) -> str:
    return name if "noise" in name else f"noise scale {name}"


def _in_words(values: np.ndarray) -> np.ndarray:
    return np.array([number(float(f"{value:.4g}")) for value in values])
