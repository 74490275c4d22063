"""What differs between two runs."""

from __future__ import annotations

import numpy as np
import pytest

from adaptive.html_report.columns import read_columns
from adaptive.html_report.comparison import RunDifference, chart, compare, in_words

from .made_up import record, uneven
from .test_about import ORIGIN


@pytest.fixture
def runs(tmp_path):
    """Two runs that differ in the speed of input, in the loss, in a loss of a rank, and in the seed."""
    busy = np.full((200, 2), 0.02)
    slower = busy + 0.02
    loss = 1.0 / (1 + np.arange(200))
    origins = [ORIGIN, {**ORIGIN, "settings": {**ORIGIN["settings"], "seed": 7}}]
    a = record(tmp_path / "a.jsonl", busy, metrics={"loss": loss}, fields={1: {"origin": origins[0]}})
    fields = {1: {"origin": origins[1]}, 9: {"lost": ["rank 1"]}}
    b = record(tmp_path / "b.jsonl", slower, input_=0.02, metrics={"loss": 2 * loss}, fields=fields)
    return read_columns(a), read_columns(b)


def test_speed_causes_metrics_events_and_settings_are_compared(runs):
    found = {difference.what: difference for difference in compare(*runs)}
    assert found["examples a second"][1:] == ("3,200", "1,600", "2.00 times as slow")
    assert found["median step"][1:3] == ("20 ms", "40 ms")
    assert found["input of 1,000 examples"][1:] == ("0 s", "312 ms", "+312 ms")
    assert "computing of 1,000 examples" not in found  # as it was
    assert found["time after 12,800 examples"][1:3] == ("4 s", "8 s")
    assert float(found["loss after 12,800 examples"].second) == pytest.approx(2 * 1 / 198.5, rel=0.02)
    assert found["steps with a loss"][1:3] == ("0", "1")
    assert found["seed"][1:3] == ("0", "7")
    assert next(iter(found)) == "examples a second"
    assert not {"hosts", "command", "began", "skipped steps", "workers at the end"} & set(found)


def test_the_shorter_run_says_where_metrics_are_compared(tmp_path):
    loss = np.linspace(3, 1, 100)
    a = record(tmp_path / "a.jsonl", uneven(100, 1, 0.1), metrics={"loss": loss})
    b = record(tmp_path / "b.jsonl", 2 * uneven(50, 1, 0.1), metrics={"loss": loss[:50]})
    found = [difference.what for difference in compare(read_columns(a), read_columns(b))]
    assert "time after 1,600 examples" in found
    assert not any(what.startswith("loss after") for what in found)  # the same after as many examples


def test_a_run_does_not_differ_from_itself(runs):
    assert compare(runs[0], runs[0]) == []
    assert in_words([]) == "Nothing differs that the records have."


def test_the_chart_has_a_line_for_each_run(runs):
    pytest.importorskip("bokeh")
    drawn = chart(runs, ("a", "b"))
    lines = [renderer.data_source.data for renderer in drawn.figure.renderers]
    assert [key.name for key in drawn.key] == ["a", "b"]
    assert lines[0]["y"][0] == 1.0
    assert lines[1]["y"][0] == 2.0
    assert lines[1]["x"][-1] == pytest.approx(8)


def differences_of(tmp_path, first, second):
    """What differs between two runs that are made with these arguments of `record`."""
    paths = (record(tmp_path / name, **options) for name, options in (("a", first), ("b", second)))
    return {difference.what: difference[1:] for difference in compare(*map(read_columns, paths))}


def test_causes_are_compared_by_the_largest_difference_first(tmp_path):
    busy = np.full((100, 1), 0.032)
    first = {"busy": busy, "parts": {"exchanging": 0.032, "hooks": 0.004, "other": 0.0010}}
    second = {"busy": busy, "parts": {"exchanging": 0.016, "hooks": 0.008, "other": 0.0001}}
    found = differences_of(tmp_path, first, second)
    assert [what for what in found if "1,000" in what] == ["exchanging of 1,000 examples", "hooks of 1,000 examples"]
    assert found["exchanging of 1,000 examples"] == ("1 s", "500 ms", "−500 ms")
    assert found["hooks of 1,000 examples"] == ("125 ms", "250 ms", "+125 ms")
    assert found["examples a second"][2] == "1.23 times as fast"


def test_a_metric_at_the_end_is_the_median_of_its_last_values(tmp_path):
    loss = np.where(np.arange(200) < 196, 5.0, [np.nan, np.inf, 1.0, 2.0] * 50)
    none = np.where(np.arange(200) < 196, 1.0, np.nan)
    busy = np.full((200, 1), 0.02)
    first = {"busy": busy, "metrics": {"loss": loss, "gone": none, "same": none}}
    second = {"busy": busy, "metrics": {"loss": np.full(200, 3.0), "gone": np.ones(200), "same": none}}
    found = differences_of(tmp_path, first, second)
    assert found == {"loss after 6,400 examples": ("1.50", "3", ""), "gone after 6,400 examples": ("NaN", "1", "")}


def test_events_at_the_end_are_compared(tmp_path):
    busy = np.full((40, 3), 0.02)
    left = busy.copy()
    left[30:, 2] = np.nan
    fields = {5: {"skipped": True}, 9: {"restores": 1, "repeated": 0}}
    found = differences_of(tmp_path, {"busy": busy}, {"busy": left, "fields": fields})
    assert {what: found[what][:2] for what in [*found][-5:]} == {
        "workers at the end": ("3", "2"),
        "global batch at the end": ("96", "64"),
        "changes of batch sizes": ("0", "1"),
        "skipped steps": ("0", "1"),
        "restores": ("0", "1"),
    }


def test_lines_are_aligned():
    found = [RunDifference("a", "1", "2"), RunDifference("longer", "3", "4", "more")]
    assert in_words(found) == "a       1 → 2\nlonger  3 → 4   more"


def test_the_chart_of_runs_without_a_common_metric_shows_their_speed(tmp_path):
    pytest.importorskip("bokeh")
    fast = record(tmp_path / "a", np.full((40, 2), 0.02), metrics={"loss": np.ones(40)})
    slow = record(tmp_path / "b", np.full((40, 2), 0.04), metrics={"top": np.ones(40)})
    drawn = chart([read_columns(fast), read_columns(slow)], ("a", "b"))
    (x, y), (_, halved) = ((r.data_source.data["x"], r.data_source.data["y"]) for r in drawn.figure.renderers)
    assert (y[5], halved[5]) == pytest.approx((3200, 1600))
    assert x == pytest.approx(0.02 * np.arange(1, 41))
    assert drawn.title == "examples a second over the time in steps"
