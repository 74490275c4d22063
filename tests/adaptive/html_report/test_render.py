"""The report as text: its content, that it loads nothing, and errors."""

from __future__ import annotations

import os
import re
import sys
import threading
from html.parser import HTMLParser

import numpy as np
import pytest
from click.testing import CliRunner

from adaptive.html_report.charts import charts
from adaptive.html_report.columns import read_columns
from adaptive.html_report.command import report
from adaptive.html_report.downsample import Bins, corners
from adaptive.html_report.formatting import duration, number, percent, workers
from adaptive.html_report.render import write
from tests.speed import limit

from .made_up import record, uneven

COVERS = ("adaptive/html_report/downsample.py", "adaptive/html_report/formatting.py")


class Text(HTMLParser):
    """What of a page is read, and what it would load."""

    def __init__(self, page):
        super().__init__()
        self.text, self.loads, self.ids, self._silent = "", [], [], 0
        self.feed(page)
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.text += " "
        self._silent += tag in ("script", "style")
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.loads += [
            url for name in ("src", "href") if (url := attributes.get(name)) and not url.startswith(("#", "data:"))
        ]

    def handle_endtag(self, tag):
        self._silent -= tag in ("script", "style")

    def handle_data(self, data):
        self.text += "" if self._silent else data


@pytest.fixture
def made(tmp_path):
    """Make the page of a record."""

    def made(path, *options, status=0):
        page = tmp_path / "page.html"
        done = CliRunner().invoke(report, [str(path), "-o", str(page), *options])
        assert done.exit_code == status, done.output
        return page.read_text() if status == 0 else done.output

    return made


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run.jsonl"


def test_a_report_contains_findings_and_events(made, run):
    busy = uneven(600, 3, 0.04)
    busy[200:400, 1] *= 1.6
    steps = np.arange(600)
    noise = np.stack([100.0 + steps, 50.0 + steps, np.where(steps < 300, np.inf, 200.0 + steps)], axis=1)
    loss = 2.0 / (1 + steps)
    loss[5] = np.nan
    page = made(record(run, busy, noise=noise, metrics={"loss": loss}, fields={300: {"skipped": True}}))
    text = Text(page)
    assert text.loads == []
    assert "default-src 'none'" in page  # nor may what is drawn load anything
    assert len(text.ids) == len(set(text.ids))
    assert '<html lang="en">' in page
    assert "<title>Run of 600 steps: run.jsonl</title>" in page
    assert "Steps 1 to 600 took" in text.text
    assert "57,600 examples, up to epoch 6" in text.text
    assert re.search(r"global batch\s*96\s*throughout", text.text)
    assert re.search(
        r"Worker 1 made the others wait 3\d % of the time from step 20\d to \d+: an example took it 1.6 times",
        text.text,
    )
    assert "1 step skipped" in text.text
    assert "adapt made no request in 59 calls." in text.text
    assert "loss went from 2 to 0.00333; the least was 0.00333, the most 2." in text.text
    assert "1 step had no number (NaN or infinite)." in text.text
    assert "Global batch and noise scale" in text.text
    assert len(page) < 1.7e6
    for chart in ("seconds", "workers", "waits", "busy", "sizes", "batch", "metric-0"):
        assert re.search(rf'<figure id="{chart}".*?role="img" aria-label="[^"]+', page, re.DOTALL), chart


def test_the_headline_and_the_tables_have_the_numbers_of_the_run(made, run):
    busy = np.full((20, 3), 0.02)
    busy[:10, 2] = np.nan
    metrics = {"loss": np.append(np.arange(19.0), np.nan), **{name: np.ones(20) for name in "abcd"}}
    exchanging = np.arange(20) / 1000
    fields = {step: {"skipped": True} for step in (4, 5)}
    text = Text(made(record(run, busy, parts={"exchanging": exchanging}, metrics=metrics, fields=fields))).text
    for said in (
        "Steps 1 to 20 took 590 ms and 1,600 examples, up to epoch 0.200: 2,710 examples a second. At the end there "
        "were 3 workers, and a global batch of 96.",
        "time in steps 590 ms 20 steps median step 29.5 ms 21.9 ms to 37.1 ms (p10, p90) examples a second 2,710 "
        "epochs 0.190 workers 3 from 2 to 3 global batch 96 from 64 to 96 skipped steps 2 10 % loss, at the end NaN "
        "last 18 a, at the end 1 b, at the end 1 c, at the end 1 Of the time in steps, 68 % computing and 32 % "
        "exchanging.",
        "cause total share median step computing 400 ms 68 % 20 ms exchanging 190 ms 32 % 9.5 ms",
        "worker 1 100 % 0 % 0 % 0 % 625 µs 640 worker 2 100 % 0 % 0 % 0 % 625 µs 320",
        "worker first last least most worker 0 32 32 32 32 worker 1 32 32 32 32 worker 2 0 32 32 32",
        "step epoch loss 1 0 0 3 0.0200 2 5 0.0400 4",
        "18 0.170 17 20 0.190 NaN",
    ):
        assert said in text
    assert "does not contain" not in text
    assert "None that cost a hundredth" not in text


def test_workers_that_have_left_are_not_counted_at_the_end(made, run):
    busy = uneven(40, 3, 0.1)
    busy[20:, 1] = np.nan
    text = Text(made(record(run, busy))).text
    assert "At the end there were 2 workers of at most 3, and a global batch of 64." in text
    assert "workers 2 from 2 to 3 global batch 64 from 64 to 96" in text
    assert "This record does not contain metrics that are single numbers." in text
    assert re.search(r" 21 \S+ m?s Worker 1 left ", text)


def test_further_changes_are_folded_and_counted(made, run):
    fields = {step: {"notes": [f"note {step}"]} for step in range(1, 331)}
    text = Text(made(record(run, uneven(400, 1, 0.1), fields=fields))).text
    assert "None that cost a hundredth of the run" in text
    assert "285 more, up to step 300" in text
    assert "30 less important events are left out" in text


def test_text_of_a_record_is_escaped(made, run):
    note = "<script>alert('x')</script> & more"
    page = made(record(run, uneven(20, 1, 0.1), fields={5: {"notes": [note]}}, metrics={"<b>loss</b>": np.ones(20)}))
    assert "alert('x')" not in page
    assert "&lt;script&gt;" in page
    assert "<b>loss" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_medians_per_example_are_of_all_steps_of_a_short_run(made, run):
    busy = 0.032 * np.array([[1.0], [1.0], [9.0], [1.0], [9.0]])  # the first step does not count
    assert re.search(r"worker 0 [^a-z]* 1 ms 160 ", Text(made(record(run, busy))).text)


@pytest.mark.parametrize(("repeated", "said"), [(4, ""), (0, "")])
def test_repeated_steps_are_counted_with_their_time(made, run, repeated, said):
    path = record(run, uneven(9, 2, 0.1), fields={6: {"restores": 1, "repeated": repeated}})
    assert f"repeated steps {repeated} in 1 restore{said} " in Text(made(path)).text


@pytest.mark.parametrize(("steps", "n"), [(1, 1), (2, 12), (9, 2)])
def test_short_runs_have_a_page(made, run, steps, n):
    metrics = {"loss": np.full(steps, np.nan), "accuracy": np.full(steps, np.inf)}
    text = Text(made(record(run, uneven(steps, n, 0.1), metrics=metrics, noise=np.full((steps, 3), np.nan)))).text
    assert f"Run of {steps} step" in text
    assert "loss, at the end NaN" in text


def test_workers_that_join_or_leave_have_gaps(made, run):
    busy = uneven(40, 10, 0.1)
    busy[:, 9] = np.nan
    busy[10:, 8], busy[:20, 7], busy[5:8] = np.nan, np.nan, np.nan
    assert "worker 9 – – – – – 0" in Text(made(record(run, busy))).text


def test_one_of_several_runs(made, run):
    for steps in (5, 7):
        record(run, uneven(steps, 2, 0.1))
    assert len(read_columns(run)) == 7
    assert "Run of 5 steps" in made(run, "--run", "0")
    assert "holds 2 runs; there is no run 4" in made(run, "--run", "4", status=2)


def test_by_default_the_report_is_written_beside_its_record(run):
    done = CliRunner().invoke(report, [str(record(run, uneven(5, 1, 0.1)))])
    assert run.with_suffix(".html").is_file()
    assert done.output.startswith(f"{run.with_suffix('.html')}: 5 steps, ")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file or directory"),
        ("", "holds 0 runs"),
        ("step,loss\n1,2\n", ":1: not a line of a record. Is this a recorded run?"),
        ('{"kind": "header", "version": 1}\n', "a record of version 1"),
        ('{"kind": "header", "version": 5, "run_id": "0", "workers": 1, "hooks": []}\n', "the run has no steps"),
        (
            '{"kind": "header", "version": 5, "run_id": "0", "workers": 1, "hooks": []}\n{"kind": "step"}\n',
            ":2: not a valid line of a record",
        ),
        (
            '{"kind": "header", "version": 5, "run_id": "0", "workers": 1, "hooks": []}\n{"kind": "stop", "step": 1}\n',
            ":2: not a valid line of a record",
        ),
    ],
)
def test_a_file_that_is_no_record_is_refused(made, run, text, why):
    if text is not None:
        run.write_text(text)
    said = made(run, status=2)
    assert said.startswith("Error: ")
    assert why in said
    assert str(run) in said


def test_a_truncated_record_gives_a_report_of_its_steps(made, run):
    record(run, uneven(9, 2, 0.1))
    run.write_text(run.read_text()[:-30])
    assert "Run of 8 steps" in made(run)


def test_a_report_that_cannot_be_written_is_an_error_of_one_line(run, tmp_path):
    record(run, uneven(5, 1, 0.1))
    for output, why in (
        ("no/such/page.html", "does not exist"),
        (".", "is a directory"),
        (run.name, "overwrite the record"),
    ):
        done = CliRunner().invoke(report, [str(run), "-o", str(tmp_path / output)])
        assert done.exit_code == 2
        assert why in done.output
    assert run.read_text().startswith('{"kind"')


def test_a_page_goes_down_a_pipe_and_leaves_it_there(run, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write("<!DOCTYPE html>", pipe)
    reader.join(limit(10))
    assert read == ["<!DOCTYPE html>"]
    assert pipe.is_fifo()


def test_without_bokeh_the_error_says_what_to_install(made, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "bokeh.models", None)
    assert "pip install 'adaptive-dataflow[plot]'" in made(record(run, uneven(5, 1, 0.1)), status=2)


def test_a_long_run_is_thinned(tmp_path):
    run = read_columns(record(tmp_path / "run.jsonl", uneven(3000, 2, 0.1), metrics={"loss": np.ones(3000)}))
    for chart in charts(run):
        assert "Each point stands for 6 steps" in chart.note or chart.name in ("workers", "sizes", "batch")


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_bins_keep_the_least_and_the_most():
    values = np.arange(1000.0)
    values[[3, 500]] = np.nan, 9999
    bins = Bins.of(1000, 10)
    assert bins.counts.tolist() == [100] * 10
    assert bins.most(values)[5] == 9999
    assert bins.least(values)[0] == 0
    assert bins.last.tolist() == [*range(99, 1000, 100)]
    assert bins.middle(values)[:2].tolist() == [50, 149.5]
    assert bins.mean(values)[1] == 149.5
    assert np.isnan(bins.mean(np.full(1000, np.nan))).all()
    assert Bins.of(3).begins.tolist() == [0, 1, 2]


def test_medians_of_bins_are_of_the_known_values_of_each_column():
    values = np.array([[1.0, np.nan], [4.0, 9.0], [2.0, np.nan], [np.nan, np.nan], [7.0, np.nan], [8.0, np.nan]])
    np.testing.assert_array_equal(Bins.of(6, 2).middle(values), [[2, 9], [7.5, np.nan]])
    np.testing.assert_array_equal(Bins.of(6, 2).mean(values), [[7 / 3, 9], [7.5, np.nan]])


def test_the_least_and_the_greatest_of_many_values_are_kept():
    """And the last one, up to the end of the chart."""
    many = np.random.default_rng(0).permutation(1000)
    kept, values = corners(10 * np.arange(1000), many, 12_345, most=100)
    expected = {f(part) for part in np.split(many, 50) for f in (np.min, np.max)} | {many[-1]}
    assert set(values) == expected
    assert kept.tolist() == sorted(kept)
    assert values[:-1].tolist() == many[kept[:-1] // 10].tolist()
    assert (kept[-1], values[-1]) == (12_345, many[-1])
    assert len(corners(np.arange(100), many[:100], 99, most=100)[0]) == 101  # exactly


def test_corners_are_kept_exactly_or_as_ranges():
    rows, values = corners(np.array([0, 3, 7]), np.array([5, 5, 9]), 12)
    assert (rows.tolist(), values.tolist()) == ([0, 7, 12], [5, 9, 9])
    many = np.arange(10_000) % 7
    many[4321] = 99
    rows, values = corners(np.arange(10_000), many, 9_999, most=100)
    assert len(rows) <= 102
    assert values.max() == 99


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (duration(0.0034), "3.4 ms"),
        (duration(12.34), "12.3 s"),
        (duration(75), "1 min 15 s"),
        (duration(7260), "2 h 1 min"),
        (duration(2e-6), "2 µs"),
        (duration(59.4), "59.4 s"),
        (duration(59.6), "1 min"),
        (duration(3599), "59 min 59 s"),
        (duration(3600), "1 h 0 min"),
        (duration(1.0), "1 s"),
        (duration(0.99), "990 ms"),
        (duration(0.0), "0 s"),
        (duration(np.nan), "?"),
        (percent(0.314), "31 %"),
        (percent(0.0), "0 %"),
        (percent(0.004), "0.4 %"),
        (percent(0.01), "1 %"),
        (percent(0.0001), "< 0.1 %"),
        (number(1234.5), "1,234"),
        (number(-0.01234), "−0.0123"),
        (number(np.inf), "∞"),
        (number(-np.inf), "−∞"),
        (number(np.nan), "NaN"),
        (number(-1234567.0), "−1,234,567"),
        (number(56.78), "56.8"),
        (number(0.0), "0"),
        (number(12345678.5), "1.23e+07"),
        (number(-0.00001234), "−1.23e−05"),
        (number(1e16), "1e+16"),
        (workers([2]), "worker 2"),
        (workers([1, 0]), "workers 0 and 1"),
        (workers([1, 8, 9, 10, 4]), "workers 1, 4 and 8 to 10"),
    ],
)
def test_numbers_are_written_as_a_person_would(said, words):
    assert said == words
