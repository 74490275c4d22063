"""Charts answer the pointer with numbers that are there, and have axes that can be read."""

from __future__ import annotations

import re

import numpy as np
import pytest

from adaptive.html_report.canvas import log_ticks
from adaptive.html_report.charts import charts
from adaptive.html_report.columns import read_columns

from .made_up import record

COVERS = (
    "adaptive/html_report/batch_charts.py",
    "adaptive/html_report/canvas.py",
    "adaptive/html_report/columns.py",
    "adaptive/html_report/worker_charts.py",
)


def drawn(path, steps=40, n=2, **options):
    sizes = np.array([[32 + t // 5] * n for t in range(steps)])
    made = charts(read_columns(record(path, np.full((steps, n), 0.02), sizes=sizes, **options)))
    return {chart.name: chart.figure for chart in made}


def test_the_first_chart_shows_the_seconds_of_steps_by_cause(tmp_path):
    first, *_ = charts(read_columns(record(tmp_path / "run.jsonl", np.full((40, 2), 0.02))))
    assert first.title == "Seconds per step, by cause"


def tooltips(figure):
    """What a pointer shows: labels, and the values at some point."""
    import bokeh.models

    (tool,) = [tool for tool in figure.tools if isinstance(tool, bokeh.models.HoverTool)]
    (renderer,) = tool.renderers
    fields = {label: re.fullmatch(r"@(\w+)(\{.*)?|@\{([^}]+)\}(\{.*)?|(\$.*)", text) for label, text in tool.tooltips}
    columns = renderer.data_source.data
    return {label: columns[found[1]] for label, found in fields.items() if found and found[1]}


@pytest.mark.parametrize("n", [1, 2, 12], ids="{} workers".format)
@pytest.mark.parametrize("noisy", [False, True], ids=["no noise", "noise"])
@pytest.mark.parametrize("steps", [40, 1500], ids="{} steps".format)
def test_every_chart_answers_the_pointer(tmp_path, n, noisy, steps):
    noise = np.full((steps, 3), [100.0, 50.0, np.inf]) if noisy else None
    figures = drawn(tmp_path / "r", steps, n, metrics={"loss": np.arange(steps) + 1.0}, noise=noise)
    assert {"batch", "metric-0"} <= figures.keys()
    assert ("sizes" in figures) == (n > 1)
    for name, figure in figures.items():
        assert tooltips(figure), name


def test_each_worker_has_its_row_in_the_map_of_waiting_times(tmp_path):
    """Around its number on the axis."""
    figure = drawn(tmp_path / "r", n=3)["waits"]
    (glyph,) = [r.glyph for r in figure.renderers if type(r.glyph).__name__ == "Image"]
    assert (glyph.y, glyph.dh, glyph.x, glyph.dw) == (-0.5, 3, 0.5, 40)
    assert (figure.y_range.start, figure.y_range.end) == (-0.5, 2.5)


def test_tooltips_show_batch_sizes_by_worker_and_step(tmp_path):
    shown = tooltips(drawn(tmp_path / "r")["sizes"])
    assert shown["step"].tolist() == list(range(1, 41))
    assert shown["worker 1"].tolist() == [32 + t // 5 for t in range(40)]


def test_tooltips_show_the_global_batch_with_the_noise_scale_and_missing_bounds(tmp_path):
    shown = tooltips(drawn(tmp_path / "r", noise=np.full((40, 3), [100.0, 50.0, np.inf]))["batch"])
    assert shown["global batch"].tolist() == [64 + 2 * (t // 5) for t in range(40)]
    assert (set(shown["at least"]), set(shown["at most"])) == ({"50"}, {"∞"})


@pytest.mark.parametrize("ends", [(32, 696), (64, 128), (90, 140), (100, 101), (0.03, 4), (1e-6, 1e9), (1e-4, 2e-4)])
def test_a_logarithmic_axis_has_ticks_within_its_ends(ends):
    ticks = log_ticks(*ends)
    assert 3 <= len(ticks) <= 16
    assert all(ends[0] <= tick <= ends[1] for tick in ticks)
    assert ticks == sorted(set(ticks))


def test_ends_that_are_powers_of_ten_have_ticks():
    assert log_ticks(1, 1e5) == [1, 10, 100, 1e3, 1e4, 1e5]
    assert log_ticks(1e-7, 1e7) == [10.0**d for d in range(-7, 8, 2)]


def test_a_chart_of_noise_between_64_and_348_has_ticks_there(tmp_path):
    scale = np.linspace(64, 348, 40)
    figure = drawn(tmp_path / "r", noise=np.stack([scale, 0.9 * scale, 1.1 * scale], 1))["batch"]
    assert [tick for tick in figure.yaxis.ticker.ticks if 64 <= tick <= 348] == [100.0, 200.0]
    assert len(figure.yaxis.ticker.ticks) >= 3
