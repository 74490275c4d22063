"""What all charts of a report share: bokeh, the colors, and an x-axis of steps on which they zoom together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .columns import Columns
from .downsample import Bins
from .findings import medians
from .layers import noise_of_layers

# The color-blind safe palette of Okabe and Ito.
PARTS = {
    "computing": "#0072B2",
    "input": "#E69F00",
    "exchanging": "#56B4E9",
    "waiting": "#D55E00",
    "hooks": "#CC79A7",
    "compiling": "#F0E442",
    "other": "#999999",
}
LINES = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8C6D1F", "#999999")
DASHES = ("solid", "dashed", "dotdash", "dotted")
FEW = len(LINES)  # up to this number of workers, each has its own line
ROOM = 1.15  # height of the y-axis in units of the highest usual value
USUAL = 97.0  # percentile; values above it may exceed the y-axis
HEIGHT = 260


class Missing(RuntimeError):
    """The charting library is not installed."""


class Key(NamedTuple):
    """One entry of a chart's legend."""

    name: str
    color: str
    dash: str = "solid"


BAND = Key("median of the workers", PARTS["computing"]), Key("from the least to the most", "#B3D4E8")


@dataclass(frozen=True)
class Chart:
    """A chart and its texts.

    Attributes:
      name: the key of the chart in the report.
      title: the heading.
      says: the content in a sentence, for screen readers and for search.
      figure: the bokeh figure.
      key: the legend.
      note: how to read the chart.
    """

    name: str
    title: str
    says: str
    figure: Any
    key: tuple[Key, ...] = ()
    note: str = ""


def embedded(made: list[Chart]) -> tuple[str, dict[str, str]]:
    """Return the script with the charts' data, and the HTML element of each chart by the chart's name."""
    from bokeh.embed import components

    script, elements = components({chart.name: chart.figure for chart in made})
    return script, elements


def library() -> str:
    """Return bokeh's JavaScript as text, for a report that loads nothing."""
    from bokeh.resources import Resources

    return "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)


def bokeh_modules() -> tuple[Any, Any]:
    """Return `bokeh.models` and `bokeh.plotting`; as `Any`, because their type hints know only an older API.

    Raises:
      Missing: bokeh is not installed.
    """
    try:
        import bokeh.models
        import bokeh.plotting
    except ImportError as error:
        raise Missing(
            "the charts are made by bokeh, which is not installed:  pip install 'adaptive-dataflow[plot]'"
        ) from error
    return bokeh.models, bokeh.plotting


class Canvas:
    """Figures of one run with a common x-axis, and bins of steps, each of which is one point.

    Attributes:
      run: the record.
      models: `bokeh.models`.
      layers: noise scales of layers: by the value that holds them, then by layer; shape=(steps,).
      bins: the steps of each point.
    """

    def __init__(self, run: Columns):
        self.run, (self.models, self._plotting) = run, bokeh_modules()
        self.layers = noise_of_layers(run.metrics, run.noise)
        first, last = int(run.step[0]), int(run.step[-1])
        margin = max(0.01 * (last - first), 0.5)
        ends = first - margin, last + margin
        self._x_range = self.models.Range1d(*ends, bounds=ends)
        self.bins = Bins.of(len(run))
        self._crosshair = self.models.Span(dimension="height", line_width=1, line_alpha=0.4, line_color="#808080")

    @cached_property
    def _where(self) -> dict[str, np.ndarray]:
        """Columns of every data source, shape=(bins,): middle of the bin, last step, seconds and examples so far."""
        run, last = self.run, self.bins.last
        middle = (run.step[self.bins.begins] + run.step[last]) / 2
        return {
            "x": middle.astype(np.float32) if middle[-1] < 1 << 23 else middle,
            "step": run.step[last].astype(np.int32),
            "elapsed": run.elapsed[last].astype(np.float32),
            "examples": run.examples[last].astype(np.float64),
        }

    def figure(self, label: str, top: float | None = None, **options: Any) -> Any:
        """Return an empty figure. `label`: of the y-axis; `top`: its upper end, if it begins at 0."""
        figure = self._plotting.figure(
            height=HEIGHT,
            sizing_mode="stretch_width",
            min_width=240,
            x_range=options.pop("x_range", self._x_range),
            tools="xpan,xbox_zoom,xwheel_zoom,reset,save",
            active_drag="xbox_zoom",
            active_scroll=None,
            toolbar_location="above",
            y_axis_label=label,
            x_axis_label=options.pop("x_axis_label", "step"),
            output_backend="canvas",
            **options,
        )
        figure.toolbar.logo, figure.toolbar.autohide = None, True
        figure.background_fill_color = figure.border_fill_color = None
        figure.outline_line_color = None
        figure.min_border_left = 72  # fixed, so that all charts are aligned
        figure.min_border_right = 28
        for axis in (*figure.xaxis, *figure.yaxis):
            axis.axis_label_text_font_style = "normal"
            axis.minor_tick_line_color = None
        if top is not None:
            figure.y_range = self.models.Range1d(0, top, bounds=(0, None))
        return figure

    def logarithmic(self, figure: Any, low: float, high: float) -> None:
        """Set the y-axis, which does not zoom, to the range from `low` to `high`, with ticks at round numbers."""
        figure.y_range = self.models.Range1d(low, high)
        figure.yaxis.ticker = self.models.FixedTicker(ticks=log_ticks(low, high))

    def over_steps(self, label: str, top: float | None = None, **options: Any) -> Any:
        """Return an empty figure over the steps, which zooms with the others."""
        figure = self.figure(label, top, **options)
        figure.xaxis.formatter = self.models.NumeralTickFormatter(format="0,0")
        figure.xaxis.ticker = self.models.BasicTicker(min_interval=1)
        figure.add_tools(self.models.CrosshairTool(overlay=self._crosshair))
        return figure

    def source(self, **columns: np.ndarray) -> Any:
        """Return a data source of columns with one value per bin, and of where the bins are."""
        return self.models.ColumnDataSource({**self._where, **{n: short(column) for n, column in columns.items()}})

    def hover(self, figure: Any, renderers: list[Any], lines: list[tuple[str, str]]) -> None:
        """Add tooltips: where the step is, and `lines` of a label and a field."""
        place = [("step", "@step{0,0}"), ("seconds so far", "@elapsed{0,0.0}"), ("examples so far", "@examples{0,0}")]
        tool = self.models.HoverTool(
            renderers=renderers, tooltips=[*place, *lines], mode="vline", line_policy="nearest"
        )
        figure.add_tools(tool)

    def hover_alone(self, figure: Any, columns: dict[str, np.ndarray], lines: list[tuple[str, str]]) -> None:
        """Add tooltips of columns that have no renderer of their own, on an invisible line through the first column."""
        source = self.source(**columns)
        self.hover(figure, [figure.line("x", next(iter(columns)), source=source, line_alpha=0)], lines)

    @property
    def points_note(self) -> str:
        """A sentence on the number of steps per point; empty if each point is one step."""
        most = int(self.bins.counts.max())
        return "" if most == 1 else f" Each point stands for {most:,} steps."

    @property
    def cividis(self) -> tuple[str, ...]:
        """A color-blind safe palette from dark to bright."""
        from bokeh.palettes import Cividis256

        return tuple(Cividis256)

    def of_each_worker(self, figure: Any, name: str, title: str, values: np.ndarray, unit: str, note: str) -> Chart:
        """Draw a line per worker, or a band with the median for more than `FEW` workers."""
        run = self.run
        if run.n <= FEW:
            columns = {f"worker_{w}": values[:, w] for w in range(run.n)}
            source = self.source(**columns)
            key = tuple(Key(f"worker {w}", LINES[w], DASHES[w % len(DASHES)]) for w in range(run.n))
            drawn = [
                figure.line("x", column, source=source, line_color=k.color, line_dash=k.dash, line_width=1.8)
                for column, k in zip(columns, key, strict=True)
            ]
            lines = [(k.name, f"@{column}{{0,0.00}} {unit}") for column, k in zip(columns, key, strict=True)]
        else:
            least, most = np.fmin.reduce(values, 1), np.fmax.reduce(values, 1)
            source = self.source(least=least, middle=medians(values, 1), most=most)
            figure.varea("x", "least", "most", source=source, fill_color=PARTS["computing"], fill_alpha=0.3)
            drawn = [figure.line("x", "middle", source=source, line_color=PARTS["computing"], line_width=1.8)]
            key = BAND
            lines = [(name, f"@{name}{{0,0.00}} {unit}") for name in ("most", "middle", "least")]
        self.hover(figure, drawn[:1], lines)
        return Chart(name, title, "", figure, key, (note + self.points_note).strip())


def log_ticks(low: float, high: float) -> list[float]:
    """Return at least three ticks for a logarithmic axis: powers of ten, and multiples of these on a short axis."""
    first, last = int(np.floor(np.log10(low))), int(np.ceil(np.log10(high)))
    decades = range(first, last + 1, max(1, (last - first) // 7))
    for mantissas in (1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8):
        ticks = [float(f"{m}e{d}") for d in decades for m in mantissas if low <= m * 10.0**d <= high]
        if len(ticks) > 3:
            return ticks
    step = 10.0 ** np.floor(np.log10((high - low) / 3))
    step *= next(m for m in (5, 2, 1) if m * step <= (high - low) / 3)
    return [float(f"{k * step:.12g}") for k in range(int(np.ceil(low / step)), int(high / step) + 1)]


def room_for(values: np.ndarray) -> float:
    """Return the upper end of a y-axis. Single outliers may exceed it, so that they do not flatten the rest."""
    if not len(values):
        return 1.0
    return (
        ROOM * float(max(np.percentile(values, USUAL), 1e-6))
        if len(values) >= 20
        else ROOM * float(max(values.max(), 1e-6))
    )


def short(column: np.ndarray) -> np.ndarray:
    """Return a column in float32, whose digits suffice for a chart."""
    return column.astype(np.float32) if column.dtype == np.float64 else column
