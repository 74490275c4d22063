"""The charts of a report, by bokeh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from adaptive.observe.scalars import FEW, counted

from .columns import Columns, mean_in, windows
from .formatting import duration, number, percent

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


class Key(NamedTuple):
    """One entry of a chart's legend."""

    name: str
    color: str
    dash: str = "area"


class Chart(NamedTuple):
    """A chart and its texts.

    Attributes:
      name: the key of the chart in the report.
      title: the heading.
      says: the content in a sentence, for screen readers and for search.
      figure: the bokeh figure.
      key: the legend.
    """

    name: str
    title: str
    says: str
    figure: Any
    key: Sequence[Key] = ()


def charts(run: Columns) -> list[Chart]:
    """Return the charts for which a record has data, in the order of the report."""
    return list(_charts(_Canvas(run)))


def embedded(made: Sequence[Chart]) -> dict[str, Any]:
    """Return bokeh's JavaScript, the script with the charts' data, and the HTML element of each chart by its name."""
    from bokeh.embed import components
    from bokeh.resources import Resources

    script, elements = components({chart.name: chart.figure for chart in made})
    library = "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)
    return {"library": library, "script": script, "elements": elements}


def _charts(canvas: _Canvas) -> Iterator[Chart]:
    run = canvas.run
    yield _seconds_by_step(canvas)
    if np.isfinite(run.workers["busy"]).sum(1).max() > 1:
        yield _waits(canvas)
    if run.noise or (run.global_batch != run.global_batch[0]).any():
        yield _global_batch(canvas)
    if run.n > 1 and len(run.resized):
        yield canvas.lines("sizes", "Batch size of each worker", "examples", _sizes(run))
    changing = {name: v for name, v in run.hyperparameters.items() if v.dtype != object and len(np.unique(v)) > 1}
    series = dict(list(run.metrics.items())[:METRICS])
    logged: dict[str, dict[str, np.ndarray]] = {}
    for name, values in run.logged.items():  # "val.loss" is drawn beside "loss"
        alike = (metric for metric in series if metric.rpartition(".")[2] == name.rpartition(".")[2])
        logged.setdefault(next(alike, name), {})[name] = _finite(values)
    for name in dict.fromkeys([*logged, *series, *changing]):
        values = _finite({**series, **changing}.get(name, np.full(len(run), np.nan)))
        if np.isfinite([*values, *np.ravel(list(logged.get(name, {}).values()))]).any():
            yield _metric(canvas, name, values, logged.get(name, {}))


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, np.nan)


class _Canvas:
    """Figures of one run. A point of a chart is the mean of some steps, or one step of a short run."""

    def __init__(self, run: Columns):
        import bokeh.models
        import bokeh.plotting

        self.run, self._new_figure = run, bokeh.plotting.figure
        self.models: Any = bokeh.models  # its type hints know only an older API
        self.begins = windows(len(run), POINTS)
        ends = np.append(self.begins[1:], len(run)) - 1
        self._where = {"x": (run.step[self.begins] + run.step[ends]) / 2, "step": run.step[ends]}

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Return the mean of each point; shape=(points, …)."""
        return mean_in(values, self.begins)

    def figure(self, label: str, top: float | None = None, **options: Any) -> Any:
        """Return an empty figure. `label` is of the y-axis, and `top` its upper end, if it begins at 0."""
        options = {"height": 260, "x_axis_label": "step", **options}
        figure: Any = self._new_figure(
            sizing_mode="stretch_width", min_width=240, y_axis_label=label, tools="xbox_zoom,reset,save",
            active_drag=None, toolbar_location="above", output_backend="canvas", **options,
        )  # fmt: skip
        figure.toolbar.logo, figure.toolbar.autohide = None, True
        figure.background_fill_color = figure.border_fill_color = figure.outline_line_color = None
        figure.min_border_left, figure.min_border_right = 72, 28  # charts below each other are aligned
        for axis in (*figure.xaxis, *figure.yaxis):
            axis.axis_label_text_font_style, axis.minor_tick_line_color = "normal", None
        if options["x_axis_label"] == "step":
            figure.xaxis.formatter = self.models.NumeralTickFormatter(format="0,0")
            figure.xaxis.ticker = self.models.BasicTicker(min_interval=1)
        if top is not None:
            figure.y_range = self.models.Range1d(0, 1.15 * max(top, 1e-9))
        return figure

    def logarithmic(self, label: str, low: float, high: float) -> Any:
        """Return an empty figure with a logarithmic y-axis, and at most eight ticks at round numbers."""
        figure = self.figure(label, y_axis_type="log")
        figure.y_range = self.models.Range1d(low, high)
        decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
        ticks = [float(f"{m}e{d}") for d in decades for m in (1, 2, 5) if low <= float(f"{m}e{d}") <= high]
        if len(ticks) > 8:
            ticks = [float(f"1e{d}") for d in decades if low <= float(f"1e{d}") <= high]
        figure.yaxis.ticker = self.models.FixedTicker(ticks=ticks[:: -(-len(ticks) // 8) or 1])
        figure.yaxis.major_label_overrides = {tick: number(tick) for tick in ticks}
        return figure

    def source(self, **columns: np.ndarray) -> Any:
        """Return a data source of columns with one value a point."""
        short = {name: np.asarray(column, np.float32) for name, column in columns.items()}
        return self.models.ColumnDataSource({**self._where, **short})

    def hover(self, figure: Any, renderer: Any, lines: Mapping[str, str]) -> None:
        """Add tooltips: the step, and lines of a label and a field."""
        tips = [("step", "@step{0,0}"), *((name.replace("@", ""), field) for name, field in lines.items())]
        tool = self.models.HoverTool(renderers=[renderer], tooltips=tips, mode="vline", line_policy="nearest")
        figure.add_tools(tool)

    def points(self, figure: Any, name: str, values: np.ndarray, color: str) -> None:
        """Draw a line with a dot for each of a few known values; shape=(T,)."""
        rows = np.flatnonzero(np.isfinite(values))
        rows = rows[:: -(-len(rows) // POINTS) or 1]
        source = self.models.ColumnDataSource({"x": self.run.step[rows].astype(float), "y": values[rows]})
        figure.line("x", "y", source=source, line_color=color, line_width=1.8)
        dots = figure.scatter("x", "y", source=source, fill_color=color, line_color=color, size=6)
        tips = [("step", "@x{0,0}"), (name.replace("@", ""), "@y{0,0.[0000]}")]
        figure.add_tools(self.models.HoverTool(renderers=[dots], tooltips=tips))

    def lines(
        self, name: str, title: str, label: str, series: Mapping[str, np.ndarray], figure: Any = None, says: str = ""
    ) -> Chart:
        """Draw a line for each of a few series; shape=(T,) each."""
        styles = [(LINES[i % len(LINES)], DASHES[i % len(DASHES)]) for i in range(len(series))]
        key = [Key(called, *style) for called, style in zip(series, styles, strict=True)]
        source = self.source(**{f"line_{i}": self.mean(values) for i, values in enumerate(series.values())})
        figure = figure or self.figure(label, float(max(np.nanmax(values) for values in series.values())))
        style = {"source": source, "mode": "after", "line_width": 1.8}
        drawn = [
            figure.step("x", f"line_{i}", line_color=k.color, line_dash=k.dash, **style) for i, k in enumerate(key)
        ]
        self.hover(figure, drawn[0], {k.name: f"@line_{i}{{0,0.[0000]}}" for i, k in enumerate(key)})
        ends = ", ".join(f"{called} {number(float(values[-1]))}" for called, values in series.items())
        return Chart(name, title, says or f"At the end: {ends}.", figure, key if len(key) > 1 else ())


def _seconds_by_step(canvas: _Canvas) -> Chart:
    """Draw the seconds per step, stacked by cause."""
    run, exact = canvas.run, len(canvas.begins) == len(canvas.run)
    means = {name: 1e3 * canvas.mean(s) for name, s in run.by_step.items()}
    order = [name for name in PARTS if name in means]
    longest = 1e3 * np.maximum.reduceat(run.seconds, canvas.begins)
    top = max(np.percentile(sum(means.values()), 97), np.percentile(longest, 90))
    figure = canvas.figure("milliseconds a step", top)
    source = canvas.source(**means, longest=longest)
    colors = [PARTS[name] for name in order]
    stacked = {"x": "x", "color": colors, "source": source}
    figure.vbar_stack(order, width=0.8, **stacked) if len(run) == 1 else figure.varea_stack(order, **stacked)
    drawn = figure.line("x", "longest", source=source, line_color="#808080", line_alpha=0.0 if exact else 1.0)
    tips = {name: f"@{name}{{0,0.00}} ms" for name in reversed(order)}
    canvas.hover(figure, drawn, tips | {"longest step": "@longest{0,0.00} ms"})
    key = [*map(Key, order, colors), *([] if exact else [Key("longest step", "#808080", "solid")])]
    typical, most = duration(float(np.median(run.seconds))), duration(float(run.seconds.max()))
    says = f"A step took {typical} in the median, {most} at most."
    return Chart("seconds", "Seconds per step, by cause", says, figure, key)


def _waits(canvas: _Canvas) -> Chart:
    """Draw a heat map of waiting: a row per worker, over the steps."""
    from bokeh.palettes import Cividis256

    run = canvas.run
    share = 100 * canvas.mean(run.workers["waiting"]) / np.maximum(canvas.mean(run.seconds), 1e-9)[:, None]
    high = float(np.clip(np.nanpercentile(share, 97), 20, 100))
    figure = canvas.figure("worker", height=min(260 + 3 * run.n, 460) if run.n > FEW else 110 + 26 * run.n)
    figure.y_range = canvas.models.Range1d(-0.5, run.n - 0.5)
    figure.yaxis.ticker = canvas.models.BasicTicker(min_interval=1, num_minor_ticks=0)
    figure.grid.grid_line_color = None
    mapper = canvas.models.LinearColorMapper(Cividis256, low=0, high=high, nan_color="rgba(0,0,0,0)")
    first, last = float(run.step[0]) - 0.5, float(run.step[-1]) + 0.5
    where = {"x": first, "y": -0.5, "dw": last - first, "dh": run.n}
    drawn = figure.image([share.T.astype(np.float32)], color_mapper=mapper, level="image", **where)
    tips = [("worker", "$y{0}"), ("step", "$x{0,0}"), ("waited", "@image{0} % of the step")]
    figure.add_tools(canvas.models.HoverTool(renderers=[drawn], tooltips=tips))
    key = [Key(f"{percent(i * high / 400)} of the step", Cividis256[round(i * 63.75)]) for i in range(5)]
    means = mean_in(run.workers["waiting"], np.zeros(1, int))[0]
    least = int(np.nanargmin(means))
    says = "Dark: the others waited for this one. Bright: it finished early, and waited. "
    says += f"Worker {least} waited least, {duration(float(means[least]))} a step."
    return Chart("waits", "Whom the others waited for", says, figure, key)


def _global_batch(canvas: _Canvas) -> Chart:
    """Draw the global batch, and on a logarithmic axis the noise scales, with the bounds of a single one."""
    series = {"global batch": canvas.run.global_batch}
    known = {name: scale for name, scale in canvas.run.noise.items() if (scale[:, 0] > 0).any()}
    if not known:
        return canvas.lines("batch", "Global batch", "examples", series)
    series |= {name: np.where(scale[:, 0] > 0, scale[:, 0], np.nan) for name, scale in list(known.items())[:FEW]}
    means = np.concatenate([canvas.mean(values) for values in series.values()])
    low, high = np.nanmin(means) / 2, 2 * np.nanmax(means)
    figure = canvas.logarithmic("examples", low, high)
    if len(series) == 2:
        lower, upper = (canvas.mean(next(iter(known.values()))[:, i]) for i in (1, 2))
        bounds = {"lower": np.fmax(lower, low), "upper": np.where(np.isfinite(upper), upper, high)}
        figure.varea("x", "lower", "upper", source=canvas.source(**bounds), fill_color=LINES[1], fill_alpha=0.2)
    says = "With a noise scale far above the batch, twice the batch is worth almost twice the step; far below, nothing."
    return canvas.lines("batch", "Global batch and noise scale", "examples", series, figure, says)


def _sizes(run: Columns) -> dict[str, np.ndarray]:
    """Return the batch sizes of each worker by name, or the most, mean and least of many."""
    if run.n <= FEW:
        return {f"worker {w}": run.sizes[:, w] for w in range(run.n)}
    there = np.where(run.sizes > 0, run.sizes, np.nan)
    return {"most": np.nanmax(there, 1), "mean": np.nanmean(there, 1), "least": np.nanmin(there, 1)}


def _metric(canvas: _Canvas, name: str, values: np.ndarray, logged: Mapping[str, np.ndarray]) -> Chart:
    """Draw a metric or a hyperparameter: mean and range of each point; beside it points of what `program.log` wrote."""
    all_ = np.concatenate([values, *logged.values()])
    low, high = np.nanpercentile(all_, [0.5, 99.5])
    if np.nanmin(all_) > 0 and high > 50 * low:
        figure = canvas.logarithmic(name, low / 1.5, 1.5 * high)
    else:
        figure, room = canvas.figure(name), 0.08 * (high - low) or 0.5 * abs(high) or 1.0
        figure.y_range = canvas.models.Range1d(low - room, high + room)
    key, says = [], []
    for place, (called, of) in enumerate(logged.items(), 1):
        key.append(Key(called, LINES[place % len(LINES)], "solid"))
        canvas.points(figure, called, of, key[-1].color)
        says.append(f"{called}: {_course(of[np.isfinite(of)])}")
    known = values[np.isfinite(values)]
    if not len(known):
        return Chart(f"metric-{name}", name, " ".join(says), figure, key if len(key) > 1 else ())
    ends = {"least": np.fmin.reduceat(values, canvas.begins), "most": np.fmax.reduceat(values, canvas.begins)}
    figure.varea("x", "least", "most", source=canvas.source(**ends), fill_color=LINES[0], fill_alpha=0.22)
    lost = len(values) - len(known)
    says = [_course(known), *([f"{counted(lost, 'step')} had no number."] if lost else []), *says]
    chart = canvas.lines(f"metric-{name}", name, name, {name: values}, figure, " ".join(says))
    return chart._replace(key=[Key(name, LINES[0], "solid"), *key]) if key else chart


def _course(known: np.ndarray) -> str:
    first, last, smallest, largest = (number(float(v)) for v in (known[0], known[-1], known.min(), known.max()))
    return f"From {first} to {last}; least {smallest}, most {largest}."
