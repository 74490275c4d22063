"""`adaptive report`: the page as text, what it never loads, two runs compared, and errors."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from click.testing import CliRunner

from adaptive.html_report.columns import Columns
from adaptive.html_report.command import report
from adaptive.html_report.formatting import duration, number, percent, workers

from .made_up import ORIGIN, record, uneven

pytest.importorskip("bokeh")
pytest.importorskip("jinja2")


class Text(HTMLParser):
    """What of a page is read, and what it would load."""

    def __init__(self, page):
        super().__init__()
        self.text, self.loads, self.charts, self._silent = "", [], [], 0
        self.feed(page)
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.text += " "
        self._silent += tag in ("script", "style")
        self.charts += [attributes["id"]] if tag == "figure" else []
        links = (attributes.get(name) or "" for name in ("src", "href"))
        self.loads += [url for url in links if url and not url.startswith("data:")]

    def handle_endtag(self, tag):
        self._silent -= tag in ("script", "style")

    def handle_data(self, data):
        self.text += "" if self._silent else data


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run.jsonl"


@pytest.fixture
def made(run):
    """Make the page of the run."""

    def made(busy, **options):
        record(run, busy, **options)
        done = CliRunner().invoke(report, [str(run)], catch_exceptions=False)
        assert done.output.startswith(f"{run.with_suffix('.html')}: {len(busy)} step")
        return run.with_suffix(".html").read_text()

    return made


def test_a_page_says_how_long_the_run_took_what_changed_and_where_the_time_went(made):
    busy, steps = uneven(600, 3, 0.04), np.arange(600)
    busy[195:405, 1] *= 1.6
    noise = np.stack([100.0 + steps, 50.0 + steps, np.where(steps < 300, np.inf, 200.0 + steps)], axis=1)
    loss = np.where(steps == 5, np.nan, 2.0 / (1 + steps))
    sizes = np.repeat([[32, 32, 32], [40, 16, 40]], [400, 200], axis=0)
    fields = {step: {"hyperparameters": {"lr": 0.1 if step < 50 else 0.2}} for step in range(1, 601)}
    metrics = {"accuracy": -loss, "loss": loss}
    page = made(busy, sizes=sizes, noise=noise, metrics=metrics, fields=fields, parts={"exchanging": 0.001})
    text = Text(page)
    assert text.loads == []
    assert "default-src 'none'" in page  # nor may what is drawn load anything
    wall = 2 + 0.6 + busy.max(1).sum()
    share = (0.6 + busy[1:].mean(1).sum()) / wall
    assert f"The run took {duration(wall)}. {percent(share)} of it was training." in text.text
    assert "The others waited for worker 1 from step 196 to 405: an example took 1.6 times as long." in text.text
    assert "401 " in text.text
    assert "Split: 32 + 32 + 32 = 96 → 40 + 16 + 40 = 96" in text.text
    assert "lr: 0.1 → 0.2" in text.text
    assert "adapt never acted: no request in 60 calls." in text.text
    assert "loss: from 2 to 0.00333; least 0.00333, most 2. 1 step had no number." in text.text
    assert "train.py --lr 3" in text.text
    charts = ["seconds", "waits", "batch", "sizes", "metric-loss", "metric-accuracy", "metric-lr"]
    assert text.charts == charts
    assert len(page) < 1.7e6


def test_one_worker_waits_for_nobody_and_text_of_a_record_is_escaped(made):
    fields = {step: {"notes": [f"note {step}"]} for step in range(1, 331)}
    fields[5] = {"notes": ["<script>alert('x')</script> & more"]}
    page = made(uneven(400, 1, 0.1), fields=fields, metrics={"<b>loss</b>": np.arange(400)})
    text = Text(page)
    assert text.charts[:2] == ["seconds", "metric-<b>loss</b>"]
    assert "waited" not in text.text
    assert "Note 200 " in text.text
    assert "130 further changes are in the record." in text.text
    assert "alert('x')" not in page
    assert "&lt;script&gt;" in page
    assert "<b>loss" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_a_short_run_has_a_page(made):
    steps, n = 1, 12
    metrics = {"loss": np.full(steps, np.nan), "accuracy": np.full(steps, np.inf)}
    text = Text(made(uneven(steps, n, 0.1), metrics=metrics, noise=np.full((steps, 3), np.nan))).text
    assert f"Run of {steps} step" in text
    assert "loss NaN at the end" in text
    assert "Nothing: batch sizes, workers and hyperparameters stayed the same." in text


def test_workers_that_join_or_leave_have_gaps_and_noise_scales_of_layers_share_a_chart(made, run):
    busy = uneven(40, 10, 0.1)
    busy[:, 9] = busy[10:, 8] = busy[:20, 7] = np.nan
    scales = {f"layers.{layer}.{part}": np.ones(40) for layer in "ab" for part in ("scale", "lower", "upper")}
    text = Text(made(busy, metrics=scales))
    assert "workers 8 from 7 to 8" in text.text
    assert text.charts == ["seconds", "waits", "batch", "sizes"]
    assert [*Columns(run).noise] == ["layers.a", "layers.b"]


def test_goodput_prints_the_causes_of_the_page(run):
    record(run, np.full((100, 1), 0.03), input_=0.01, fields={9: {"lost": ["worker 1 lost: gone"]}})
    done = CliRunner().invoke(report, [str(run), "--goodput"], catch_exceptions=False)
    first, _, *rows = done.output.splitlines()
    assert first == "run.jsonl: 5 s, 100 steps, 1 start"
    assert rows[0].split()[:5] == ["computing", "2", "s", "40", "%"]
    assert ["start", "1", "s", "20", "%"] in [row.split()[:5] for row in rows]
    assert rows[-1].split() == ["goodput", "40", "%"]
    assert not run.with_suffix(".html").exists()


def compared(tmp_path, first, second):
    """Return what differs between two runs that are made with these arguments of `record`."""
    paths = [str(record(tmp_path / name, **options)) for name, options in (("a", first), ("b", second))]
    done = CliRunner().invoke(report, paths, catch_exceptions=False)
    return dict(re.split(r"\s{2,}", line, maxsplit=1) for line in done.output.splitlines()[1:])


def test_two_runs_are_compared(tmp_path):
    busy, loss = np.full((200, 2), 0.02), 1.0 / (1 + np.arange(200))
    bounds = {"upper": np.full(200, np.inf), "gone": np.where(np.arange(200) < 190, 1.0, np.nan)}
    bounds["at times"] = np.where(np.arange(200) % 2, 2.0, np.nan)
    origin = {**ORIGIN, "settings": {**ORIGIN["settings"], "seed": 7}}
    first = {"busy": busy, "metrics": {"loss": loss, **bounds}}
    fields = {1: {"origin": origin}, 5: {"skipped": True}, 9: {"lost": ["rank 1"]}}
    second = {"busy": busy + 0.02, "input_": 0.02, "fields": fields}
    second["metrics"] = {"loss": loss, **{name: np.ones(200) for name in bounds}}
    assert compared(tmp_path, first, second) == {
        "examples a second": "3,200 → 1,600, 0.50 times as many",
        "median step": "20 ms → 40 ms",
        "took": "6 s → 10 s",
        "training (goodput)": "67 % → 40 %",
        "computing of 1,000 examples": "313 ms → 311 ms",
        "input of 1,000 examples": "– → 311 ms",
        "time after 12,800 examples": "4 s → 8 s",
        "upper after 12,800 examples": "∞ → 1",
        "gone after 12,800 examples": "NaN → 1",
        "at times after 12,800 examples": "2 → 1",
        "steps with lost workers": "– → 1",
        "skipped steps": "– → 1",
        "seed": "0 → 7",
    }


def test_metrics_are_compared_after_as_many_examples_as_the_shorter_run_has(tmp_path):
    loss = np.linspace(3, 1, 100)
    first = {"busy": uneven(100, 1, 0.1), "metrics": {"loss": loss}}
    found = compared(tmp_path, first, {"busy": 2 * uneven(50, 1, 0.1), "metrics": {"loss": loss[:50]}})
    assert "time after 1,600 examples" in found
    assert not any(what.startswith("loss after") for what in found)


def test_one_of_several_runs(run):
    record(run, uneven(5, 2, 0.1))
    run.write_text(run.read_text().replace('"run_id":"a"', '"run_id":"b"').replace('"run_id": "a"', '"run_id": "b"'))
    record(run, uneven(7, 2, 0.1))
    assert len(Columns(run)) == 7
    assert " 5 steps" in CliRunner().invoke(report, [str(run), "--run", "0", "--goodput"]).output


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["none.jsonl"], "No such file"),
        (["run.jsonl", "none.jsonl"], "No such file"),
        (["run.jsonl", "--run", "3"], "there is no run 3"),
        (["run.jsonl", "-o", "no/where.html"], "No such file"),
        (["run.jsonl", "-o", "run.jsonl"], "would overwrite the record"),
    ],
)
def test_what_cannot_be_read_or_written_is_one_line(run, monkeypatch, arguments, why):
    monkeypatch.chdir(record(run, uneven(5, 1, 0.1)).parent)
    done = CliRunner().invoke(report, arguments)
    assert done.exit_code == 2
    assert done.output.startswith("Error: ")
    assert why in done.output


def test_without_bokeh_the_error_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "bokeh.models", None)
    done = CliRunner().invoke(report, [str(record(run, uneven(5, 1, 0.1)))])
    assert done.exit_code == 2
    assert "pip install 'adaptive-dataflow[plot]'" in done.output


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (duration(0.0034), "3.4 ms"),
        (duration(75), "1 min 15 s"),
        (duration(59.6), "1 min"),
        (duration(7260), "2 h 1 min"),
        (duration(0.0), "0 s"),
        (duration(np.nan), "?"),
        (percent(0.004), "0.4 %"),
        (percent(0.0001), "< 0.1 %"),
        (number(1234.5), "1,234"),
        (number(-0.01234), "−0.0123"),
        (number(np.inf), "∞"),
        (number(np.nan), "NaN"),
        (workers([1, 8, 9, 10, 4]), "workers 1, 4 and 8 to 10"),
    ],
)
def test_numbers_are_written_as_a_person_would(said, words):
    assert said == words
