"""Charts answer the pointer with numbers that are there, and have axes that can be read."""

from __future__ import annotations

import re

import numpy as np
import pytest

from adaptive.html_report.canvas import BAND, PARTS, log_ticks, room_for
from adaptive.html_report.charts import charts
from adaptive.html_report.columns import read_columns
from adaptive.html_report.worker_charts import worker_shares

from .made_up import record

COVERS = (
    "adaptive/html_report/batch_charts.py",
    "adaptive/html_report/canvas.py",
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


# --- the numbers that are drawn ---------------------------------------------------------------------------------------


def made(path, busy, **options):
    return {chart.name: chart for chart in charts(read_columns(record(path, busy, **options)))}


def of_glyphs(chart, kind):
    """The columns of the glyphs of one kind."""
    return [r.data_source.data for r in chart.figure.renderers if type(r.glyph).__name__ == kind]


def ends(axis):
    return pytest.approx((axis.start, axis.end))


def test_a_step_is_drawn_as_its_parts_in_milliseconds(tmp_path):
    exchanging = np.where(np.arange(40) == 7, 0.3, 0.01)
    chart = made(tmp_path / "r", np.full((40, 1), 0.02), parts={"exchanging": exchanging})["seconds"]
    shown = tooltips(chart.figure)
    assert shown["computing"] == pytest.approx(np.full(40, 20.0))
    assert shown["exchanging"] == pytest.approx(1e3 * exchanging)
    assert shown["longest step"] == pytest.approx(1e3 * (0.02 + exchanging))
    assert shown["seconds so far"] == pytest.approx(np.cumsum(0.02 + exchanging))
    assert shown["examples so far"].tolist() == [32 * step for step in range(1, 41)]
    assert {(key.name, key.color) for key in chart.key} == set(PARTS.items())
    assert chart.says == "A step took 30 ms in the median, 320 ms at most."
    assert chart.note == "1 of 40 steps are longer than the chart is high."
    assert len(of_glyphs(chart, "VArea")) == len(PARTS)
    assert ends(chart.figure.x_range) == (0.5, 40.5)


def test_points_of_a_long_run_stand_for_the_mean_and_the_longest_of_their_steps(tmp_path):
    busy = np.full((1500, 1), 0.02) + 0.01 * (np.arange(1500) % 3 == 1)[:, None]
    chart = made(tmp_path / "r", busy)["seconds"]
    shown = tooltips(chart.figure)
    assert (shown["step"][[0, -1]].tolist(), len(shown["step"])) == ([3, 1500], 500)
    assert chart.figure.renderers[0].data_source.data["x"][[0, -1]].tolist() == [2, 1499]
    assert shown["computing"] == pytest.approx(np.full(500, 70 / 3))
    assert shown["longest step"] == pytest.approx(np.full(500, 30.0))
    assert [key.name for key in chart.key][-2:] == ["other", "longest step"]
    assert chart.note == "Each point stands for 3 steps."
    assert ends(chart.figure.x_range) == (1 - 14.99, 1500 + 14.99)
    assert ends(chart.figure.y_range) == (0, 1.15 * 30)


def test_a_run_of_one_step_is_drawn_as_a_bar(tmp_path):
    chart = made(tmp_path / "r", np.full((1, 1), 0.02))["seconds"]
    assert (len(of_glyphs(chart, "VBar")), of_glyphs(chart, "VArea")) == (len(PARTS), [])
    assert ends(chart.figure.y_range) == (0, 23)


def test_a_single_long_step_does_not_flatten_the_others():
    values = np.full(40, 2.0)
    assert room_for(np.append(values, 50.0)) == pytest.approx(2.3)
    assert room_for(np.append(values[:18], 50.0)) == pytest.approx(57.5)  # of few steps, all are within
    assert room_for(np.array([])) == 1


@pytest.mark.parametrize(("steps", "top"), [(19, 575), (100, 23)])
def test_the_axis_of_seconds_has_room_for_the_usual_steps(tmp_path, steps, top):
    """And for all of a few."""
    busy = np.full((steps, 1), 0.02)
    busy[7] = 0.5
    assert ends(made(tmp_path / "r", busy)["seconds"].figure.y_range) == (0, top)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.linspace(2, 12, 40), (1.2, 12.8)),
        (np.linspace(-10, 10, 40), (-11.6, 11.6)),
        (np.full(40, -4.0), (-6, -2)),
        (np.zeros(40), (-1, 1)),
        (np.linspace(0, 100, 40), (-8, 108)),
        (np.linspace(-1, 100, 40), (-9.08, 108.08)),
        (np.geomspace(1e-3, 1, 40), (1e-3 / 1.5, 1.5)),
        (np.linspace(1, 49, 40), (1 - 0.08 * 48, 49 + 0.08 * 48)),
        (np.where(np.arange(400) == 9, 1e6, 1.0 + np.arange(400) % 2), (0.92, 2.08)),
    ],
)
def test_the_axis_of_a_metric_has_its_values(tmp_path, values, expected):
    values = values.astype(float)
    chart = made(tmp_path / "r", np.full((len(values), 1), 0.02), metrics={"loss": values})["metric-0"]
    assert ends(chart.figure.y_range) == expected
    assert (type(chart.figure.y_scale).__name__ == "LogScale") == (values[0] == 1e-3)


def test_a_metric_is_drawn_with_gaps_and_a_long_one_with_its_range(tmp_path):
    values = np.array([3.0, np.nan, np.inf, 1.0, 8.0, 2.0])
    chart = made(tmp_path / "r", np.full((6, 1), 0.02), metrics={"a": np.ones(6), "loss": values})["metric-1"]
    np.testing.assert_array_equal(tooltips(chart.figure)["loss"], [3, np.nan, np.nan, 1, 8, 2])
    assert chart.says == "loss went from 3 to 2; the least was 1, the most 8."
    assert chart.note == "2 steps had no number (NaN or infinite)."
    assert [key.name for key in chart.key] == ["loss"]
    long = np.tile([5.0, np.nan, 9.0], 500)
    chart = made(tmp_path / "s", np.full((1500, 1), 0.02), metrics={"loss": long})["metric-0"]
    (band,) = of_glyphs(chart, "VArea")
    assert {name: set(band[name]) for name in ("least", "middle", "most")} == {"least": {5}, "middle": {7}, "most": {9}}
    assert [key.name for key in chart.key] == ["median", "from the least to the most"]
    assert chart.note == "500 steps had no number (NaN or infinite). Each point stands for 3 steps."


def test_a_metric_that_is_the_noise_scale_of_a_hook_has_no_second_chart(tmp_path):
    scale = np.linspace(50, 90, 40)
    scale[3] = np.nan
    noise = np.stack([scale, scale / 2, scale * 2], 1)
    metrics = {"noise.scale": scale, "twice": 2 * scale, "none": np.full(40, np.nan)}
    found = made(tmp_path / "r", np.full((40, 2), 0.02), metrics=metrics, noise=noise)
    assert [name for name in found if name.startswith("metric")] == ["metric-1"]


def test_the_noise_scale_is_drawn_between_its_bounds(tmp_path):
    noise = np.tile([100.0, 50.0, 400.0], (40, 1))
    noise[1], noise[2, 1:], noise[3, 2] = [-5.0, 50.0, 400.0], np.nan, np.inf
    noise[4] = np.nan
    chart = made(tmp_path / "r", np.full((40, 2), 0.02), noise=noise)["batch"]
    (band,) = of_glyphs(chart, "VArea")
    np.testing.assert_allclose(band["middle"][:6], [100, np.nan, 100, 100, np.nan, 100])
    np.testing.assert_allclose(band["lower"][:6], [50, 50, 1e-3, 50, 1e-3, 50], rtol=1e-6)
    np.testing.assert_allclose(band["upper"][:6], [400, 400, 1e5, 1e5, 1e5, 400])
    assert ends(chart.figure.y_range) == (32, 200)
    assert [key.name for key in chart.key] == ["global batch", "noise", "its bounds"]
    assert band["at_most"][[0, 2, 3]].tolist() == ["400", "NaN", "∞"]


def test_batch_sizes_are_drawn_as_steps_with_room_above(tmp_path):
    sizes = np.repeat([[32, 32], [32, 48], [20, 60]], [10, 10, 20], axis=0)
    found = made(tmp_path / "r", np.full((40, 2), 0.02), sizes=sizes)
    lines = [(data["x"].tolist(), data["y"].tolist()) for data in of_glyphs(found["sizes"], "Step")]
    assert lines == [([1, 21, 40], [32, 20, 20]), ([1, 11, 21, 40], [32, 48, 60, 60])]
    assert ends(found["sizes"].figure.y_range) == (0, 69)
    (line,) = of_glyphs(found["batch"], "Step")
    assert (line["x"].tolist(), line["y"].tolist()) == ([1, 11, 40], [64, 80, 80])
    assert ends(found["batch"].figure.y_range) == (0, 92)


@pytest.mark.parametrize(("n", "band"), [(8, False), (9, True)])
def test_more_than_eight_workers_are_drawn_as_a_band(tmp_path, n, band):
    """Of those that are there."""
    busy, sizes = np.tile(np.arange(1, n + 1) / 100, (40, 1)), np.tile(np.arange(1, n + 1) * 10, (40, 1))
    busy[:, 2], sizes[:, 2] = np.nan, 0
    sizes[20:, 0] = 15
    found = made(tmp_path / "r", busy, sizes=sizes)
    for name, expected in (("sizes", (15, 50, 10 * n)), ("busy", (10, 50, 10 * n))):
        shown = tooltips(found[name].figure)
        assert ("least" in shown) == band
        if band:
            assert tuple(shown[part][-1] for part in ("least", "middle", "most")) == pytest.approx(expected)
            assert found[name].key == BAND
        else:
            assert shown["worker 7"][-1] == pytest.approx(expected[-1])
            assert len(found[name].key) == len({(key.color, key.dash) for key in found[name].key}) == 8
    assert ends(found["busy"].figure.y_range) == (0, 11.5 * n)
    assert tooltips(found["sizes"].figure)["least" if band else "worker 0"][19] == 10


def test_shares_of_a_workers_time_add_up(tmp_path):
    """Without its first step, which contains preparation."""
    busy = np.tile([0.02, 0.04, 0.03], (40, 1))
    busy[0], busy[:30, 2] = 9.0, np.nan
    run = read_columns(record(tmp_path / "r", busy, input_=[0.005, 0.0, 0.0]))
    shares = worker_shares(run)
    assert sum(shares.values()) == pytest.approx(np.ones(3))
    assert shares["waiting"] == pytest.approx([0.5, 0, 0.25])
    assert shares["input"] == pytest.approx([0.125, 0, 0])
    assert shares["computing"] == pytest.approx([0.375, 1, 0.75])
    (chart,) = (chart for chart in charts(run) if chart.name == "workers")
    assert chart.says == "Worker 0 waited for longest, 50 % of its time."
    (tool,) = (tool for tool in chart.figure.tools if type(tool).__name__ == "HoverTool")
    assert tool.renderers[0].data_source.data["computing"] == pytest.approx([37.5, 100, 75])
    assert ends(chart.figure.y_range) == (0, 100)
    assert [key.name for key in chart.key][-1] == "waiting for other workers"


@pytest.mark.parametrize(
    ("n", "shown"), [(8, None), (9, ["0", "2", "4", "6", "8"]), (17, [*map(str, range(0, 17, 3))])]
)
def test_of_many_workers_some_have_a_label(tmp_path, n, shown):
    axis = made(tmp_path / "r", np.full((9, n), 0.02))["workers"].figure.xaxis[0]
    assert getattr(axis.formatter, "args", {}).get("shown") == shown


def test_waiting_is_drawn_as_a_share_of_the_time(tmp_path):
    busy = np.tile([0.01, 0.05, 0.04], (40, 1))
    busy[20:, 1:] = np.nan  # then nobody waits
    chart = made(tmp_path / "r", busy)["waits"]
    (image,) = of_glyphs(chart, "Image")
    share = image["image"][0]
    np.testing.assert_allclose(share[:, 5], [80, 0, 20], rtol=1e-5)
    assert np.isnan(share[:, [0, 20, 39]]).all()
    assert chart.says == "On average, workers waited 33 % of the time for the last of them."
    assert [key.name for key in chart.key] == ["0 %", "20 %", "40 %", "60 %", "80 % and more"]
    calm = made(tmp_path / "s", np.full((40, 2), 0.02))["waits"]
    assert calm.key[-1].name == "20 % and more"
    assert "waits" not in made(tmp_path / "t", np.full((40, 1), 0.02))


def test_one_worker_has_no_chart_that_compares_workers(tmp_path):
    found = made(tmp_path / "r", np.full((40, 1), 0.02))
    assert [*found] == ["seconds", "workers", "batch"]
    assert found["workers"].says == ""
