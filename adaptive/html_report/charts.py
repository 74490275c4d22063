"""The charts of a report, drawn by bokeh. Charts over the steps of the run share one x-axis and zoom together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .columns import Columns
from .downsample import Bins, corners
from .findings import medians, periods, waiting
from .formatting import counted, duration, number, percent
from .layers import is_of_layers, noise_of_layers

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
_LINES = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8C6D1F", "#999999")
_DASHES = ("solid", "dashed", "dotdash", "dotted")
FEW = len(_LINES)  # up to this number of workers, each has its own line
_ROOM = 1.15  # height of the y-axis in units of the highest usual value
_USUAL = 97.0  # percentile; values above it may exceed the y-axis
_HEIGHT = 260


class Missing(RuntimeError):
    """The charting library is not installed."""


class Key(NamedTuple):
    """One entry of a chart's legend."""

    name: str
    color: str
    dash: str = "solid"


_BAND = Key("median of the workers", PARTS["computing"]), Key("from the least to the most", "#B3D4E8")


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


def charts(run: Columns) -> list[Chart]:
    """Return the charts for which the record has data.

    Raises:
      Missing: bokeh is not installed.
    """
    drawing = _Drawing(run)
    made: list[Chart | None] = [drawing.seconds(), drawing.shares_of_workers(), drawing.waits(), drawing.busy()]
    made += [drawing.batch_sizes(), drawing.global_batch(), *drawing.noise_of_layers()]
    made += map(drawing.metric, run.metrics)
    return [chart for chart in made if chart is not None]


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


class _Drawing:
    """The charts of one run, with the x-axis, bins and crosshair that they share."""

    def __init__(self, run: Columns):
        self._run, (self._models, self._plotting) = run, bokeh_modules()
        self._layers = noise_of_layers(run.metrics, run.noise)
        first, last = int(run.step[0]), int(run.step[-1])
        margin = max(0.01 * (last - first), 0.5)
        ends = first - margin, last + margin
        self._x_range = self._models.Range1d(*ends, bounds=ends)
        self._bins = Bins.of(len(run))
        self._crosshair = self._models.Span(dimension="height", line_width=1, line_alpha=0.4, line_color="#808080")

    # --- building blocks ----------------------------------------------------------------------------------------------

    @cached_property
    def _where(self) -> dict[str, np.ndarray]:
        """Columns of every data source, shape=(bins,): middle of the bin, last step, seconds and examples so far."""
        run, last = self._run, self._bins.last
        middle = (run.step[self._bins.begins] + run.step[last]) / 2
        return {
            "x": middle.astype(np.float32) if middle[-1] < 1 << 23 else middle,
            "step": run.step[last].astype(np.int32),
            "elapsed": run.elapsed[last].astype(np.float32),
            "examples": run.examples[last].astype(np.float64),
        }

    def _figure(self, label: str, top: float | None = None, **options: Any) -> Any:
        figure = self._plotting.figure(
            height=_HEIGHT,
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
            figure.y_range = self._models.Range1d(0, top, bounds=(0, None))
        return figure

    def _logarithmic(self, figure: Any, low: float, high: float) -> None:
        """Set the y-axis, which does not zoom, to the range from `low` to `high`, with ticks at round numbers."""
        figure.y_range = self._models.Range1d(low, high)
        figure.yaxis.ticker = self._models.FixedTicker(ticks=log_ticks(low, high))

    def _over_steps(self, label: str, top: float | None = None, **options: Any) -> Any:
        figure = self._figure(label, top, **options)
        figure.xaxis.formatter = self._models.NumeralTickFormatter(format="0,0")
        figure.xaxis.ticker = self._models.BasicTicker(min_interval=1)
        figure.add_tools(self._models.CrosshairTool(overlay=self._crosshair))
        return figure

    def _source(self, **columns: np.ndarray) -> Any:
        return self._models.ColumnDataSource({**self._where, **{n: _short(column) for n, column in columns.items()}})

    def _hover(self, figure: Any, renderers: list[Any], lines: list[tuple[str, str]]) -> None:
        place = [("step", "@step{0,0}"), ("seconds so far", "@elapsed{0,0.0}"), ("examples so far", "@examples{0,0}")]
        tool = self._models.HoverTool(
            renderers=renderers, tooltips=[*place, *lines], mode="vline", line_policy="nearest"
        )
        figure.add_tools(tool)

    def _hover_alone(self, figure: Any, columns: dict[str, np.ndarray], lines: list[tuple[str, str]]) -> None:
        """Add tooltips of columns that have no renderer of their own, on an invisible line through the first column."""
        source = self._source(**columns)
        self._hover(figure, [figure.line("x", next(iter(columns)), source=source, line_alpha=0)], lines)

    @property
    def _each(self) -> str:
        """A sentence on the number of steps per point; empty if each point is one step."""
        most = int(self._bins.counts.max())
        return "" if most == 1 else f" Each point stands for {most:,} steps."

    @property
    def _cividis(self) -> tuple[str, ...]:
        """A color-blind safe palette from dark to bright."""
        from bokeh.palettes import Cividis256

        return tuple(Cividis256)

    # --- seconds ------------------------------------------------------------------------------------------------------

    def seconds(self) -> Chart | None:
        """Draw the seconds per step, stacked by cause."""
        run, bins = self._run, self._bins
        longest = bins.most(run.seconds)
        mean = bins.mean(run.seconds)
        top = _room_for(mean if len(mean) < 20 else np.append(mean, np.percentile(longest, 90)))
        figure = self._over_steps("milliseconds a step", 1e3 * top)
        line = {"line_color": "#808080", "line_width": 1}
        if run.breakdown is None:
            source = self._source(mean=1e3 * mean, longest=1e3 * longest)
            drawn = figure.line("x", "mean", source=source, line_color=PARTS["computing"], line_width=2)
            if bins.counts.max() > 1:
                figure.line("x", "longest", source=source, **line)
            self._hover(figure, [drawn], [("mean", "@mean{0,0.00} ms"), ("longest", "@longest{0,0.00} ms")])
            key: tuple[Key, ...] = (Key("a step", PARTS["computing"]),)
        else:
            shares = bins.mean(run.breakdown)
            order = [part for part in PARTS if part in run.parts] + [part for part in run.parts if part not in PARTS]
            columns = {part: 1e3 * shares[:, run.parts.index(part)] for part in order}
            source = self._source(**columns, longest=1e3 * longest)
            colors = [PARTS.get(part, "#333333") for part in order]
            if len(bins.begins) == 1:
                figure.vbar_stack(order, x="x", width=0.8, color=colors, source=source)
            else:
                figure.varea_stack(order, x="x", color=colors, source=source)
            drawn = figure.line("x", "longest", source=source, **line) if bins.counts.max() > 1 else None
            drawn = drawn or figure.line("x", "longest", source=source, line_alpha=0)
            told = [(part, f"@{part}{{0,0.00}} ms") for part in reversed(order)]
            self._hover(figure, [drawn], [*told, ("longest step", "@longest{0,0.00} ms")])
            key = tuple(map(Key, order, colors))
        key += (Key("longest step", "#808080"),) * bool(bins.counts.max() > 1)
        above = int((run.seconds > top).sum())
        note = f"{above:,} of {len(run):,} steps are longer than the chart is high." if above else ""
        typical, most = duration(float(np.median(run.seconds))), duration(float(run.seconds.max()))
        says = f"A step took {typical} in the median, {most} at most."
        title = "Seconds per step" + ", by cause" * (run.breakdown is not None)
        return Chart("seconds", title, says, figure, key, (note + self._each).strip())

    # --- workers ------------------------------------------------------------------------------------------------------

    def shares_of_workers(self) -> Chart | None:
        """Draw the shares of each worker's time: computing, input, other work, and waiting for the others."""
        run = self._run
        if not run.workers:
            return None
        shares = worker_shares(run)
        names = [str(w) for w in range(run.n)]
        columns = {name: 100 * _short(share) for name, share in shares.items()}
        source = self._models.ColumnDataSource({"worker": names, **columns})
        figure = self._figure("% of its time", 100, x_range=self._models.FactorRange(*names), x_axis_label="worker")
        colors = [PARTS[name] for name in shares]
        drawn = figure.vbar_stack(list(shares), x="worker", width=0.86, color=colors, source=source)
        figure.xgrid.grid_line_color = None
        if run.n > FEW:
            shown = names[:: -(-run.n // FEW)]
            figure.xaxis.formatter = self._models.CustomJSTickFormatter(
                args={"shown": shown}, code="return shown.includes(tick) ? tick : ''"
            )
            figure.xaxis.major_tick_line_color = None
        tool = self._models.HoverTool(
            renderers=drawn[:1], mode="vline",
            tooltips=[("worker", "@worker"), *((name, f"@{name}{{0.0}} %") for name in reversed(shares))],
        )  # fmt: skip
        figure.add_tools(tool)
        known = np.isfinite(shares["waiting"])
        if not known.any():
            return None
        longest = int(np.nanargmax(shares["waiting"]))
        says = (
            f"Worker {longest} waited for longest, {percent(float(shares['waiting'][longest]))} of its time."
            if run.n > 1
            else ""
        )
        key = tuple(Key(_OF_WORKERS[name], PARTS[name]) for name in shares)
        return Chart(
            "workers",
            "What each worker did",
            says,
            figure,
            key,
            "Over all steps in which it was there, up to their messages: exchanging is the same for all.",
        )

    def waits(self) -> Chart | None:
        """Draw a heat map of waiting: a row per worker, over the steps."""
        run, bins = self._run, self._bins
        if not run.workers:
            return None
        busy = run.workers["busy"]
        together = np.isfinite(busy).sum(1) > 1  # nobody waits for a single worker
        if not together.any():
            return None
        waits, period = bins.mean(waiting(np.where(together[:, None], busy, np.nan))), bins.mean(periods(run))
        share = 100 * waits / np.maximum(period, 1e-9)[:, None]
        high = float(np.clip(np.nanpercentile(share, _USUAL), 20, 100))
        figure = self._over_steps("worker", y_range=self._models.Range1d(-0.5, run.n - 0.5, bounds=(-0.5, run.n - 0.5)))
        figure.height = min(_HEIGHT + 3 * run.n, 460) if run.n > FEW else 110 + 26 * run.n
        figure.yaxis.ticker = self._models.BasicTicker(min_interval=1, num_minor_ticks=0)
        figure.grid.grid_line_color = None
        colors = self._cividis
        mapper = self._models.LinearColorMapper(colors, low=0, high=high, nan_color="rgba(0,0,0,0)")
        first, last = float(run.step[0]) - 0.5, float(run.step[-1]) + 0.5
        drawn = figure.image(
            [share.T.astype(np.float32)], x=first, y=-0.5, dw=last - first, dh=run.n, color_mapper=mapper, level="image"
        )
        tool = self._models.HoverTool(
            renderers=[drawn],
            tooltips=[("worker", "$y{0}"), ("step", "$x{0,0}"), ("waited", "@image{0} % of the time")],
        )
        figure.add_tools(tool)
        on_average = percent(float(np.nanmean(share)) / 100)
        says = f"On average, workers waited {on_average} of the time for the last of them."
        note = "Dark: the others waited for this one. Bright: it finished early, and waited." + self._each
        marks = np.linspace(0, 1, 5)
        key = tuple(Key(percent(mark * high / 100), colors[round(mark * (len(colors) - 1))]) for mark in marks)
        key = (*key[:-1], key[-1]._replace(name=f"{key[-1].name} and more"))
        return Chart("waits", "Who waited for the last of them", says, figure, key, note)

    def busy(self) -> Chart | None:
        """Draw the busy time of each worker, or minimum, median and maximum of more than `FEW` workers."""
        run, bins = self._run, self._bins
        if not run.workers or run.n < 2 or not np.isfinite(run.workers["busy"]).any():
            return None
        busy = 1e3 * bins.middle(run.workers["busy"])
        longest = np.fmax.reduce(busy, 1)
        top = _room_for(longest[np.isfinite(longest)])
        figure = self._over_steps("milliseconds a step", top)
        title = "Seconds that each worker was busy in a step"
        return self._of_each(figure, "busy", title, busy, "ms", "Without what it waited for others, and exchanging.")

    def _of_each(self, figure: Any, name: str, title: str, values: np.ndarray, unit: str, note: str) -> Chart:
        """Draw a line per worker, or a band with the median for more than `FEW` workers."""
        run = self._run
        if run.n <= FEW:
            columns = {f"worker_{w}": values[:, w] for w in range(run.n)}
            source = self._source(**columns)
            key = tuple(Key(f"worker {w}", _LINES[w], _DASHES[w % len(_DASHES)]) for w in range(run.n))
            drawn = [
                figure.line("x", column, source=source, line_color=k.color, line_dash=k.dash, line_width=1.8)
                for column, k in zip(columns, key, strict=True)
            ]
            told = [(k.name, f"@{column}{{0,0.00}} {unit}") for column, k in zip(columns, key, strict=True)]
        else:
            least, most = np.fmin.reduce(values, 1), np.fmax.reduce(values, 1)
            source = self._source(least=least, middle=medians(values, 1), most=most)
            figure.varea("x", "least", "most", source=source, fill_color=PARTS["computing"], fill_alpha=0.3)
            drawn = [figure.line("x", "middle", source=source, line_color=PARTS["computing"], line_width=1.8)]
            key = _BAND
            told = [(name, f"@{name}{{0,0.00}} {unit}") for name in ("most", "middle", "least")]
        self._hover(figure, drawn[:1], told)
        return Chart(name, title, "", figure, key, (note + self._each).strip())

    # --- batch sizes and noise ----------------------------------------------------------------------------------------

    def batch_sizes(self) -> Chart | None:
        """Draw the batch size of each worker, or minimum, median and maximum of more than `FEW` workers."""
        run = self._run
        if run.n < 2:
            return None
        figure = self._over_steps("examples", _ROOM * max(float(run.changed.max()), 1.0))
        title, end = "Batch size of each worker", len(run) - 1
        if run.n > FEW:
            there = np.where(run.changed > 0, run.changed.astype(float), np.nan)
            bounds = np.fmin.reduce(there, 1), np.fmax.reduce(there, 1)
            repeats = np.diff(np.append(run.changes, len(run)))
            least, most = (
                f(np.repeat(b, repeats)) for f, b in zip((self._bins.least, self._bins.most), bounds, strict=True)
            )
            middle = self._bins.middle(np.repeat(medians(there, 1), repeats))
            source = self._source(least=least, middle=middle, most=most)
            figure.varea("x", "least", "most", source=source, fill_color=PARTS["computing"], fill_alpha=0.3)
            drawn = figure.line("x", "middle", source=source, line_color=PARTS["computing"], line_width=1.8)
            told = [(name, f"@{name}{{0,0}} examples") for name in ("most", "middle", "least")]
            self._hover(figure, [drawn], told)
            return Chart("sizes", title, "", figure, _BAND, self._each.strip())
        key = tuple(Key(f"worker {w}", _LINES[w], _DASHES[w % len(_DASHES)]) for w in range(run.n))
        for w, (_, color, dash) in enumerate(key):
            rows, sizes = corners(run.changes, run.changed[:, w], end)
            figure.step(run.step[rows], sizes, mode="after", line_color=color, line_dash=dash, line_width=1.8)
        columns = {f"worker_{w}": run.sizes[self._bins.last, w] for w in range(run.n)}
        self._hover_alone(figure, columns, [(k.name, f"@worker_{w}{{0,0}} examples") for w, k in enumerate(key)])
        return Chart("sizes", title, "", figure, key)

    def global_batch(self) -> Chart | None:
        """Draw the global batch, with the noise scale and its bounds if they are recorded."""
        run = self._run
        rows, sizes = corners(run.changes, run.changed.sum(1), len(run) - 1)
        known = {name: scale for name, scale in run.noise.items() if np.isfinite(scale[:, 0]).any()}
        scales = {name: scale for name, scale in known.items() if not is_of_layers(name, self._layers)}
        if not scales:
            figure = self._over_steps("examples", _ROOM * float(max(sizes.max(), 1)))
            figure.step(run.step[rows], sizes, mode="after", line_color="#0072B2", line_width=2)
            batch = {"batch": run.global_batch[self._bins.last]}
            self._hover_alone(figure, batch, [("global batch", "@batch{0,0} examples")])
            return Chart("batch", "Global batch", "", figure, (Key("global batch", "#0072B2"),))
        figure = self._over_steps("examples", y_axis_type="log")
        key = [Key("global batch", "#0072B2")]
        low, high = [float(max(sizes.min(), 1))], [float(max(sizes.max(), 1))]
        for place, (name, scale) in enumerate(scales.items()):
            middle = self._bins.middle(scale[:, 0])
            positive = middle[middle > 0]
            low += [float(np.percentile(positive, 1))] if len(positive) else []
            high += [float(positive.max())] if len(positive) else []
            color = ("#D55E00", "#009E73", "#CC79A7")[place % 3]
            lower, upper = (self._bins.middle(scale[:, i]) for i in (1, 2))
            above = 1e3 * max(high)  # infinite bounds lie outside the chart
            columns = {
                "middle": np.where(middle > 0, middle, np.nan),
                "lower": np.maximum(np.nan_to_num(lower, nan=1e-3), 1e-3),
                "upper": np.where(np.isinf(upper), above, np.nan_to_num(upper, nan=above)),
                "at_least": _in_words(lower),
                "at_most": _in_words(upper),
                "batch": run.global_batch[self._bins.last],
            }
            source = self._source(**columns)
            figure.varea("x", "lower", "upper", source=source, fill_color=color, fill_alpha=0.18)
            drawn = figure.line("x", "middle", source=source, line_color=color, line_width=1.8)
            told = [("global batch", "@batch{0,0}"), (_called(name), "@middle{0,0.0}")]
            told += [("at least", "@at_least"), ("at most", "@at_most")]
            self._hover(figure, [drawn], told)
            key += [Key(_called(name), color), Key("its bounds", f"{color}40")]
        figure.step(run.step[rows], sizes, mode="after", line_color="#0072B2", line_width=2, line_dash="solid")
        self._logarithmic(figure, min(low) / 2, 2 * max(high))
        figure.yaxis.formatter = self._models.NumeralTickFormatter(format="0,0.[0000]")
        note = (
            "Where the noise scale is far above the global batch, twice the batch is worth almost twice the step; "
            f"where it is far below, almost nothing.{self._each}"
        )
        return Chart("batch", "Global batch and noise scale", "", figure, tuple(key), note)

    def noise_of_layers(self) -> list[Chart]:
        """Draw the noise scales of layers, one chart for each value that holds them, with a line for each layer."""
        return [chart for root, scales in self._layers.items() if (chart := self._noise_of(root, scales)) is not None]

    def _noise_of(self, root: str, scales: dict[str, np.ndarray]) -> Chart | None:
        middle = {layer: self._bins.middle(np.where(scale > 0, scale, np.nan)) for layer, scale in scales.items()}
        known = np.concatenate([values[np.isfinite(values)] for values in middle.values()])
        if not len(known):
            return None
        figure = self._over_steps("examples", y_axis_type="log")
        self._logarithmic(figure, float(np.percentile(known, 1)) / 2, 2 * float(known.max()))
        source = self._source(**{f"layer_{place}": values for place, values in enumerate(middle.values())})
        styles = [(_LINES[i % FEW], _DASHES[i // FEW % len(_DASHES)]) for i in range(len(middle))]
        key = tuple(Key(layer, *style) for layer, style in zip(middle, styles, strict=True))
        drawn = [
            figure.line("x", f"layer_{i}", source=source, line_color=k.color, line_dash=k.dash, line_width=1.8)
            for i, k in enumerate(key)
        ]
        self._hover(figure, drawn[:1], [(k.name, f"@layer_{i}{{0,0.0}} examples") for i, k in enumerate(key)])
        last = {layer: values[np.isfinite(values)][-1] for layer, values in middle.items() if np.isfinite(values).any()}
        low, high = min(last, key=lambda name: last[name]), max(last, key=lambda name: last[name])
        says = f"At the end it was least for {low}, {number(last[low])}, and most for {high}, {number(last[high])}."
        return Chart(f"layers-{root}", f"Noise scale by layer: {root}", says, figure, key, self._each.strip())

    # --- metrics ------------------------------------------------------------------------------------------------------

    def metric(self, name: str) -> Chart | None:
        """Draw one of the driver's metrics: median and range of each bin."""
        run, bins = self._run, self._bins
        if is_of_layers(name, self._layers):
            return None  # they have a chart of their own
        values = np.where(np.isfinite(run.metrics[name]), run.metrics[name], np.nan)
        if not np.isfinite(values).any() or any(
            np.allclose(values, s[:, 0], 1e-4, equal_nan=True) for s in run.noise.values()
        ):
            return None  # no numbers, or a noise scale, which has a chart with its bounds
        known = values[np.isfinite(values)]
        low, high = np.percentile(known, [0.5, 99.5]) if len(known) > 50 else (known.min(), known.max())
        logarithmic = bool(known.min() > 0 and high > 50 * max(low, 1e-300))
        figure = self._over_steps(name, y_axis_type="log" if logarithmic else "linear")
        if logarithmic:
            self._logarithmic(figure, low / 1.5, 1.5 * high)
        else:
            room = 0.08 * (high - low) or 0.5 * abs(high) or 1.0
            figure.y_range = self._models.Range1d(low - room, high + room)
        middle, least, most = bins.middle(values), bins.least(values), bins.most(values)
        source = self._source(middle=middle, least=least, most=most)
        key: tuple[Key, ...] = (Key(name, "#0072B2"),)
        if bins.counts.max() > 1:
            figure.varea("x", "least", "most", source=source, fill_color="#0072B2", fill_alpha=0.22)
            key = Key("median", "#0072B2"), Key("from the least to the most", "#B3D4E8")
        drawn = figure.line("x", "middle", source=source, line_color="#0072B2", line_width=1.8)
        self._hover(figure, [drawn], [(name.replace("@", ""), "@middle{0,0.0000}")])
        lost = int((~np.isfinite(run.metrics[name])).sum())
        first, last, lowest, highest = (number(float(f)) for f in (known[0], known[-1], known.min(), known.max()))
        says = f"{name} went from {first} to {last}; the least was {lowest}, the most {highest}."
        note = f"{counted(lost, 'step')} had no number (NaN or infinite)." if lost else ""
        return Chart(f"metric-{list(run.metrics).index(name)}", name, says, figure, key, (note + self._each).strip())


_OF_WORKERS = {
    "computing": "computing",
    "input": "waiting for input",
    "other": "other work of its own",
    "waiting": "waiting for other workers",
}


def worker_shares(run: Columns) -> dict[str, np.ndarray]:
    """Return the shares of each worker's time before messages: computing, input, other, waiting; each shape=(n,)."""
    busy = run.workers["busy"]
    seconds = {"computing": run.workers["computing"], "input": run.workers["input"]}
    took = {name: np.nansum(values, axis=0, dtype=np.float64) for name, values in seconds.items()}
    took["waiting"] = np.nansum(waiting(busy), axis=0, dtype=np.float64)
    own = np.nansum(busy, axis=0, dtype=np.float64)
    took["other"] = np.maximum(own - took["computing"] - took["input"], 0.0)
    total = sum(took.values())
    return {name: np.where(total > 0, took[name] / np.maximum(total, 1e-12), np.nan) for name in _OF_WORKERS}


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


def _called(name: str) -> str:
    return name if "noise" in name else f"noise scale {name}"


def _room_for(values: np.ndarray) -> float:
    """Return the upper end of a y-axis. Single outliers may exceed it, so that they do not flatten the rest."""
    if not len(values):
        return 1.0
    return (
        _ROOM * float(max(np.percentile(values, _USUAL), 1e-6))
        if len(values) >= 20
        else _ROOM * float(max(values.max(), 1e-6))
    )


def _in_words(values: np.ndarray) -> np.ndarray:
    return np.array([number(float(f"{value:.4g}")) for value in values])


def _short(column: np.ndarray) -> np.ndarray:
    """Return a column in float32, whose digits suffice for a chart."""
    return column.astype(np.float32) if column.dtype == np.float64 else column
