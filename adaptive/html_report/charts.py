"""The charts of a report, by bokeh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from adaptive.observe.scalars import FEW, counted

from .columns import Columns, mean_in, windows
from .formatting import duration, number

POINTS = 500  # about two pixels a point on a wide screen
METRICS = 12  # further metrics are in the record

# The color-blind safe palette of Okabe and Ito.
PARTS = {
    "computing": "#0072B2",
    "exchanging": "#56B4E9",
    "input": "#E69F00",
    "waiting": "#D55E00",
    "hooks": "#CC79A7",
    "compiling": "#F0E442",
    "other": "#999999",
}
LINES = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8C6D1F", "#999999")
DASHES = ("solid", "dashed")


class Chart(NamedTuple):
    """A chart and its texts."""

    name: str  # in the report
    title: str
    says: str  # the content in a sentence, also for screen readers and for search
    figure: Any  # of bokeh


def charts(run: Columns) -> list[Chart]:
    """Return the charts for which a record has data, in the order of the report."""
    canvas = _Canvas(run)
    made = [_seconds_by_step(canvas)]
    if np.isfinite(run.workers["busy"]).sum(1).max() > 1:
        made.append(_waits(canvas))
    if run.noise or len(np.unique(run.global_batch)) > 1:
        made.append(_global_batch(canvas))
    if run.n > 1 and len(run.resized):
        made.append(_lines(canvas, "sizes", "Batch size of each worker", _sizes(run)))
    return made + [_metric(canvas, *each) for each in _metrics(run)]


def embedded(made: Sequence[Chart]) -> dict[str, Any]:
    """Return bokeh's JavaScript, the script with the charts' data, and the HTML element of each chart by its name."""
    from bokeh.embed import components
    from bokeh.resources import Resources

    for chart in made:
        for legend in chart.figure.legend:
            legend.visible, legend.orientation, legend.border_line_color = len(legend.items) > 1, "horizontal", None
            legend.ncols = 4
            chart.figure.add_layout(legend, "above")
    script, elements = components({chart.name: chart.figure for chart in made})
    library = "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)
    return {"library": library, "script": script, "elements": elements}


class _Canvas:
    """Figures of one run. A point of a chart is the mean of some steps, or one step of a short run."""

    def __init__(self, run: Columns):
        import bokeh.models
        import bokeh.plotting

        self.run = run
        self.models: Any = bokeh.models  # its type hints know only an older API
        self._new_figure: Any = bokeh.plotting.figure
        self.begins = windows(len(run), POINTS)
        ends = np.append(self.begins[1:], len(run)) - 1
        self._where = {"x": (run.step[self.begins] + run.step[ends]) / 2, "step": run.step[ends]}

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Return the mean of each point; shape=(points, …)."""
        return mean_in(values, self.begins)

    def figure(self, label: str, low: float, high: float, **options: Any) -> Any:
        """Return an empty figure, whose y-axis has this label and range."""
        figure: Any = self._new_figure(
            sizing_mode="stretch_width", min_width=240, x_axis_label="step", y_axis_label=label,
            y_range=(low, high), tools="xbox_zoom,reset,save", active_drag=None, toolbar_location="above",
            output_backend="canvas", **{"height": 260, **options},
        )  # fmt: skip
        figure.toolbar.logo, figure.toolbar.autohide = None, True
        figure.background_fill_color = figure.border_fill_color = figure.outline_line_color = None
        figure.min_border_left, figure.min_border_right = 72, 28  # charts below each other are aligned
        for axis in (*figure.xaxis, *figure.yaxis):
            axis.axis_label_text_font_style, axis.minor_tick_line_color = "normal", None
        figure.xaxis.formatter = self.models.NumeralTickFormatter(format="0,0")
        figure.xaxis.ticker = self.models.BasicTicker(min_interval=1)
        if options.get("y_axis_type") == "log":
            figure.yaxis.ticker = self.models.LogTicker(mantissas=[1, 2, 5])
            figure.yaxis.formatter = self.models.PrintfTickFormatter(format="%g")
        return figure

    def source(self, **columns: np.ndarray) -> Any:
        """Return a data source of columns with one value a point."""
        short = {name: np.asarray(column, np.float32) for name, column in columns.items()}
        return self.models.ColumnDataSource({**self._where, **short})

    def hover(self, figure: Any, renderer: Any, lines: Mapping[str, str], **options: Any) -> None:
        """Add tooltips: lines of a label and a field."""
        tips = [(name.replace("@", ""), field) for name, field in lines.items()]
        figure.add_tools(self.models.HoverTool(renderers=[renderer], tooltips=tips, **options))

    def points(self, figure: Any, name: str, values: np.ndarray, color: str) -> None:
        """Draw a line with a dot for each of a few known values; shape=(T,)."""
        rows = np.flatnonzero(np.isfinite(values))
        rows = rows[:: -(-len(rows) // POINTS) or 1]
        source = self.models.ColumnDataSource({"x": self.run.step[rows].astype(float), "y": values[rows]})
        figure.line("x", "y", source=source, line_color=color, line_width=1.8, legend_label=name)
        dots = figure.scatter("x", "y", source=source, fill_color=color, line_color=color, size=6)
        self.hover(figure, dots, {"step": "@x{0,0}", name: "@y{0,0.[0000]}"})

    def lines(self, figure: Any, series: Mapping[str, np.ndarray]) -> None:
        """Draw a line for each of a few series; shape=(T,) each."""
        source = self.source(**{f"line_{i}": self.mean(values) for i, values in enumerate(series.values())})
        for i, name in enumerate(series):
            style = {"line_color": LINES[i % len(LINES)], "line_dash": DASHES[i % 2], "line_width": 1.8}
            drawn = figure.step("x", f"line_{i}", source=source, mode="after", legend_label=name, **style)
        tips = {name: f"@line_{i}{{0,0.[0000]}}" for i, name in enumerate(series)}
        self.hover(figure, drawn, {"step": "@step{0,0}"} | tips, mode="vline", line_policy="nearest")


def _seconds_by_step(canvas: _Canvas) -> Chart:
    """Draw the seconds per step, stacked by cause."""
    run = canvas.run
    means = {name: 1e3 * canvas.mean(run.by_step[name]) for name in PARTS if name in run.by_step}
    longest = 1e3 * np.maximum.reduceat(run.seconds, canvas.begins)
    top = max(np.percentile(sum(means.values()), 97), np.percentile(longest, 90), 1e-9)
    figure = canvas.figure("milliseconds a step", 0.0, 1.15 * top)
    source = canvas.source(**means, longest=longest)
    stacked = {"x": "x", "color": [PARTS[name] for name in means], "source": source, "legend_label": [*means]}
    figure.varea_stack([*means], **stacked)
    style = {"line_color": "#808080", "legend_label": "longest step"}
    drawn = figure.line("x", "longest", source=source, **style)
    tips = {name: f"@{name}{{0,0.00}} ms" for name in reversed(means)}
    tips = {"step": "@step{0,0}"} | tips | {"longest step": "@longest{0,0.00} ms"}
    canvas.hover(figure, drawn, tips, mode="vline", line_policy="nearest")
    typical, most = duration(float(np.median(run.seconds))), duration(float(run.seconds.max()))
    says = f"A step took {typical} in the median, {most} at most."
    return Chart("seconds", "Seconds per step, by cause", says, figure)


def _waits(canvas: _Canvas) -> Chart:
    """Draw a heat map of waiting: a row per worker, over the steps."""
    from bokeh.palettes import Cividis256

    run = canvas.run
    share = 100 * canvas.mean(run.workers["waiting"]) / np.maximum(canvas.mean(run.seconds), 1e-9)[:, None]
    high = float(np.clip(np.nanpercentile(share, 97), 20, 100))
    height = min(160 + 26 * run.n, 510)
    figure = canvas.figure("worker", -0.5, run.n - 0.5, height=height)
    figure.yaxis.ticker = canvas.models.BasicTicker(min_interval=1, num_minor_ticks=0)
    figure.grid.grid_line_color = None
    mapper = canvas.models.LinearColorMapper(Cividis256, low=0, high=high, nan_color="rgba(0,0,0,0)")
    first, last = float(run.step[0]) - 0.5, float(run.step[-1]) + 0.5
    where = {"x": first, "y": -0.5, "dw": last - first, "dh": run.n}
    drawn = figure.image([share.T.astype(np.float32)], color_mapper=mapper, level="image", **where)
    canvas.hover(figure, drawn, {"worker": "$y{0}", "step": "$x{0,0}", "waited": "@image{0} % of the step"})
    bar = canvas.models.ColorBar(color_mapper=mapper, title="% of the step", height=8, background_fill_color=None)
    figure.add_layout(bar, "above")
    means = mean_in(run.workers["waiting"], np.zeros(1, int))[0]
    least = int(np.nanargmin(means))
    says = "Dark: the others waited for this one. Bright: it finished early, and waited. "
    says += f"Worker {least} waited least, {duration(float(means[least]))} a step."
    return Chart("waits", "Whom the others waited for", says, figure)


def _global_batch(canvas: _Canvas) -> Chart:
    """Draw the global batch, and on a logarithmic axis the noise scales, with the bounds of a single one."""
    series = {"global batch": canvas.run.global_batch}
    known = {name: scale for name, scale in canvas.run.noise.items() if (scale[:, 0] > 0).any()}
    if not known:
        return _lines(canvas, "batch", "Global batch", series)
    series |= {name: np.where(scale[:, 0] > 0, scale[:, 0], np.nan) for name, scale in list(known.items())[:FEW]}
    means = np.concatenate([canvas.mean(values) for values in series.values()])
    low, high = np.nanmin(means) / 2, 2 * np.nanmax(means)
    figure = canvas.figure("examples", low, high, y_axis_type="log")
    if len(series) == 2:
        lower, upper = (canvas.mean(next(iter(known.values()))[:, i]) for i in (1, 2))
        bounds = {"lower": np.fmax(lower, low), "upper": np.where(np.isfinite(upper), upper, high)}
        figure.varea("x", "lower", "upper", source=canvas.source(**bounds), fill_color=LINES[1], fill_alpha=0.2)
    says = "With a noise scale far above the batch, twice the batch is worth almost twice the step; far below, nothing."
    return _lines(canvas, "batch", "Global batch and noise scale", series, figure, says)


def _lines(
    canvas: _Canvas, name: str, title: str, series: Mapping[str, np.ndarray], figure: Any = None, says: str = ""
) -> Chart:
    """Draw series in examples, by default from 0 on; shape=(T,) each."""
    figure = figure or canvas.figure("examples", 0.0, 1.15 * float(max(np.nanmax(v) for v in series.values())))
    canvas.lines(figure, series)
    ends = ", ".join(f"{called} {number(float(values[-1]))}" for called, values in series.items())
    return Chart(name, title, says or f"At the end: {ends}.", figure)


def _sizes(run: Columns) -> dict[str, np.ndarray]:
    """Return the batch sizes of each worker by name, or the most, mean and least of many."""
    if run.n <= FEW:
        return {f"worker {w}": run.sizes[:, w] for w in range(run.n)}
    there = np.where(run.sizes > 0, run.sizes, np.nan)
    return {"most": np.nanmax(there, 1), "mean": np.nanmean(there, 1), "least": np.nanmin(there, 1)}


def _metrics(run: Columns) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yield metrics and hyperparameters that change, each with what is drawn by name: logged values are drawn beside
    their metric, "val.loss" beside "loss". Those without a metric come first.
    """
    changing = {n: v for n, v in run.hyperparameters.items() if v.dtype != object and len(np.unique(v)) > 1}
    series = {name: np.where(np.isfinite(v), v, np.nan) for name, v in [*run.metrics.items()][:METRICS]} | changing
    beside: dict[str, dict[str, np.ndarray]] = {}
    for name, values in run.logged.items():
        alike = (metric for metric in series if metric.rpartition(".")[2] == name.rpartition(".")[2])
        beside.setdefault(next(alike, name), {})[name] = np.where(np.isfinite(values), values, np.nan)
    for name in dict.fromkeys([*beside, *series]):
        drawn = {**({name: series[name]} if name in series else {}), **beside.get(name, {})}
        drawn = {called: values for called, values in drawn.items() if np.isfinite(values).any()}
        if drawn:
            yield name, drawn


def _metric(canvas: _Canvas, name: str, series: Mapping[str, np.ndarray]) -> Chart:
    """Draw a metric or a hyperparameter, with mean and range of each point, and points of what `program.log` wrote."""
    low, high = np.nanpercentile(np.concatenate([*series.values()]), [0.5, 99.5])
    if min(map(np.nanmin, series.values())) > 0 and high > 50 * low:
        figure = canvas.figure(name, low / 1.5, 1.5 * high, y_axis_type="log")
    else:
        room = 0.08 * (high - low) or 0.5 * abs(high) or 1.0
        figure = canvas.figure(name, low - room, high + room)
    says: list[str] = []
    for (called, values), color in zip(series.items(), LINES, strict=False):
        known, is_logged = values[np.isfinite(values)], called in canvas.run.logged
        first, last, least, most = (number(float(v)) for v in (known[0], known[-1], known.min(), known.max()))
        says.append(f"{called}: from {first} to {last}; least {least}, most {most}.")
        if is_logged:
            canvas.points(figure, called, values, color)
            continue
        says += [f"{counted(len(values) - len(known), 'step')} had no number."] if len(known) < len(values) else []
        ends = {"least": np.fmin.reduceat(values, canvas.begins), "most": np.fmax.reduceat(values, canvas.begins)}
        figure.varea("x", "least", "most", source=canvas.source(**ends), fill_color=color, fill_alpha=0.22)
        canvas.lines(figure, {called: values})
    return Chart(f"metric-{name}", name, " ".join(says), figure)
