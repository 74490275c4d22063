"""Charts of the workers: how each spent its time, who waited for whom, and how long each was busy."""

from __future__ import annotations

import numpy as np

from .canvas import FEW, HEIGHT, PARTS, USUAL, Canvas, Chart, Key, room_for, short
from .columns import Columns
from .findings import periods, waiting
from .formatting import percent

_OF_WORKERS = {
    "computing": "computing",
    "input": "waiting for input",
    "other": "other work of its own",
    "waiting": "waiting for other workers",
}


def time_shares(canvas: Canvas) -> Chart | None:
    """Draw the shares of each worker's time: computing, input, other work, and waiting for the others."""
    run = canvas.run
    if not run.workers:
        return None
    shares = worker_shares(run)
    names = [str(w) for w in range(run.n)]
    columns = {name: 100 * short(share) for name, share in shares.items()}
    source = canvas.models.ColumnDataSource({"worker": names, **columns})
    figure = canvas.figure("% of its time", 100, x_range=canvas.models.FactorRange(*names), x_axis_label="worker")
    colors = [PARTS[name] for name in shares]
    drawn = figure.vbar_stack(list(shares), x="worker", width=0.86, color=colors, source=source)
    figure.xgrid.grid_line_color = None
    if run.n > FEW:
        shown = names[:: -(-run.n // FEW)]
        figure.xaxis.formatter = canvas.models.CustomJSTickFormatter(
            args={"shown": shown}, code="return shown.includes(tick) ? tick : ''"
        )
        figure.xaxis.major_tick_line_color = None
    tool = canvas.models.HoverTool(
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


def waiting_times(canvas: Canvas) -> Chart | None:
    """Draw a heat map of waiting: a row per worker, over the steps."""
    run, bins = canvas.run, canvas.bins
    if not run.workers:
        return None
    busy = run.workers["busy"]
    together = np.isfinite(busy).sum(1) > 1  # nobody waits for a single worker
    if not together.any():
        return None
    waits, period = bins.mean(waiting(np.where(together[:, None], busy, np.nan))), bins.mean(periods(run))
    share = 100 * waits / np.maximum(period, 1e-9)[:, None]
    high = float(np.clip(np.nanpercentile(share, USUAL), 20, 100))
    figure = canvas.over_steps("worker", y_range=canvas.models.Range1d(-0.5, run.n - 0.5, bounds=(-0.5, run.n - 0.5)))
    figure.height = min(HEIGHT + 3 * run.n, 460) if run.n > FEW else 110 + 26 * run.n
    figure.yaxis.ticker = canvas.models.BasicTicker(min_interval=1, num_minor_ticks=0)
    figure.grid.grid_line_color = None
    colors = canvas.cividis
    mapper = canvas.models.LinearColorMapper(colors, low=0, high=high, nan_color="rgba(0,0,0,0)")
    first, last = float(run.step[0]) - 0.5, float(run.step[-1]) + 0.5
    drawn = figure.image(
        [share.T.astype(np.float32)], x=first, y=-0.5, dw=last - first, dh=run.n, color_mapper=mapper, level="image"
    )
    tool = canvas.models.HoverTool(
        renderers=[drawn],
        tooltips=[("worker", "$y{0}"), ("step", "$x{0,0}"), ("waited", "@image{0} % of the time")],
    )
    figure.add_tools(tool)
    on_average = percent(float(np.nanmean(share)) / 100)
    says = f"On average, workers waited {on_average} of the time for the last of them."
    note = "Dark: the others waited for this one. Bright: it finished early, and waited." + canvas.points_note
    marks = np.linspace(0, 1, 5)
    key = tuple(Key(percent(mark * high / 100), colors[round(mark * (len(colors) - 1))]) for mark in marks)
    key = (*key[:-1], key[-1]._replace(name=f"{key[-1].name} and more"))
    return Chart("waits", "Who waited for the last of them", says, figure, key, note)


def busy_times(canvas: Canvas) -> Chart | None:
    """Draw the busy time of each worker, or minimum, median and maximum of more than `FEW` workers."""
    run, bins = canvas.run, canvas.bins
    if not run.workers or run.n < 2 or not np.isfinite(run.workers["busy"]).any():
        return None
    busy = 1e3 * bins.middle(run.workers["busy"])
    longest = np.fmax.reduce(busy, 1)
    top = room_for(longest[np.isfinite(longest)])
    figure = canvas.over_steps("milliseconds a step", top)
    title = "Seconds that each worker was busy in a step"
    return canvas.of_each_worker(
        figure, "busy", title, busy, "ms", "Without what it waited for others, and exchanging."
    )


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
