"""What differs between two runs."""

from __future__ import annotations

import numpy as np
import pytest

from adaptive.html_report.columns import read_columns
from adaptive.html_report.comparison import chart, compare, in_words

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
