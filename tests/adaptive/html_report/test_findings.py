"""Findings are the problems put into a made-up record, and no others."""

from __future__ import annotations

import re

import numpy as np
import pytest

from adaptive.html_report.columns import read_columns
from adaptive.html_report.findings import excess, findings, medians, where_it_went
from adaptive.html_report.intervals import intervals

from .made_up import record, uneven

COVERS = ("adaptive/html_report/intervals.py",)


@pytest.fixture
def findings_of(tmp_path):
    """The findings of a made-up run, as text."""

    def findings_of(busy, **options):
        return [finding.text for finding in findings(read_columns(record(tmp_path / "run.jsonl", busy, **options)))]

    return findings_of


def steps_of(text):
    """From which step to which."""
    first, last = re.search(r"from step ([\d,]+) to ([\d,]+)", text).groups()
    return int(first.replace(",", "")), int(last.replace(",", ""))


# --- intervals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [300, 1000, 20_000])
@pytest.mark.parametrize("level", [0.2, 0.5])
def test_a_stretch_is_found_where_it_is(steps, level):
    first, end = int(0.41 * steps), int(0.87 * steps)
    series = np.random.default_rng(1).normal(0, 0.08, steps)
    series[first:end] += level
    (found,) = intervals(series, 0.1)
    assert found.first == pytest.approx(first, abs=4 + steps // 1000)
    assert found.end == pytest.approx(end, abs=4 + steps // 1000)
    assert found.level == pytest.approx(level, rel=0.1)


@pytest.mark.parametrize("steps", [6, 50, 400, 5000])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1, 0.3])
def test_noise_alone_has_no_stretches(steps, noise):
    rng = np.random.default_rng(steps)
    assert [found for _ in range(5) for found in intervals(rng.normal(0, noise, steps), 0.1)] == []


def test_single_steps_are_no_stretch():
    series = np.zeros(500)
    series[[100, 200, 201, 499]] = 0.95
    assert intervals(series, 0.1) == []


def test_two_levels_are_two_stretches_where_they_differ_by_much():
    series = np.repeat([0.0, 0.2, 0.7, 0.0], 100)
    assert [(s.first, s.end) for s in intervals(series, 0.1)] == [(100, 200), (200, 300)]
    assert len(intervals(np.repeat([0.0, 0.2, 0.3, 0.0], 100), 0.1)) == 1


def test_one_interval_covers_a_value_that_stays_high():
    assert intervals(np.full(50, 0.4), 0.1) == [(0, 50, pytest.approx(0.4))]


# --- workers ----------------------------------------------------------------------------------------------------------


def test_the_median_of_an_even_number_is_the_lower_middle_value():
    values = np.array([[4, 1, 3, 2], [np.nan, 7, 5, np.nan], [9, 1, np.nan, 2], [np.nan] * 4])
    np.testing.assert_array_equal(medians(values, 1), [2, 5, 2, np.nan])


def test_excess_is_over_half_of_the_others():
    busy = np.array([[1.0, 1.0, 3.0], [1.0, np.nan, 4.0], [2.0, np.nan, np.nan], [5.0, 1.0, 2.0]])
    expected = [[0, 0, 2], [-3, np.nan, 3], [np.nan] * 3, [4, -1, 1]]
    expected[0][:2] = [0, 0]
    np.testing.assert_allclose(excess(busy), expected)
    np.testing.assert_allclose(excess(np.array([[1.0, 2.0, 3.0, 4.0, 9.0]])), [[-2, -1, 1, 2, 7]])


@pytest.mark.parametrize(("n", "spread"), [(2, 0.05), (2, 0.3), (5, 0.2), (16, 0.1)])
def test_workers_that_differ_by_chance_are_not_blamed(findings_of, n, spread):
    for seed in range(3):
        assert not [text for text in findings_of(uneven(600, n, spread, seed)) if "made the others wait" in text]


def test_a_slow_worker_is_named_with_its_steps_and_why(findings_of):
    busy = uneven(1200, 4, 0.05)
    busy[399:900, 2] *= 1.5
    (text,) = findings_of(busy)
    assert text.startswith("Worker 2 made the others wait 3")
    assert "an example took it 1.5 times as long" in text
    np.testing.assert_allclose(steps_of(text), (400, 900), atol=6)


def test_a_report_says_how_long_the_run_would_have_taken_without_a_slow_phase(findings_of):
    busy = np.full((1000, 4), 0.1) * (1 + 0.001 * uneven(1000, 4, 0.05))
    usual = busy.max(axis=1).sum()
    busy[499:, 2] *= 2
    (text,) = findings_of(busy)
    less, share = re.search(r"the run would have taken ([\d.]+) s \((\d+) %\) less", text).groups()
    saved = busy.max(axis=1).sum() - usual
    np.testing.assert_allclose(float(less), saved, rtol=0.05)
    np.testing.assert_allclose(int(share), 100 * saved / busy.max(axis=1).sum(), atol=2)


def test_of_two_workers_the_slow_one_is_named(findings_of):
    busy = uneven(300, 2, 0.05)
    busy[:, 1] *= 1.4
    (text,) = findings_of(busy)
    assert re.match(r"Worker 1 made the others wait 2\d % of the time throughout: an example took it 1.4", text)


def test_workers_of_one_host_are_named_together(findings_of):
    busy = uneven(2000, 16, 0.03)
    busy[1000:1500, 8:12] *= 1.6
    (text,) = findings_of(busy)
    assert text.startswith("Workers 8 to 11 made the others wait 3")
    np.testing.assert_allclose(steps_of(text), (1001, 1500), atol=10)


def test_a_worker_with_too_many_examples_is_not_called_slow(findings_of):
    busy = uneven(300, 3, 0.02) * [2, 1, 1]
    (text,) = findings_of(busy, sizes=[64, 32, 32])
    assert "Worker 0" in text
    assert "it had 2.0 times as many examples" in text
    assert "an example" not in text


def test_a_worker_that_waits_for_its_input_is_not_called_slow(findings_of):
    busy = uneven(300, 3, 0.02) + np.array([0, 0.02, 0])
    (text,) = findings_of(busy, input_=[0.0, 0.02, 0.0])
    assert "Worker 1" in text
    assert "it waited 20 ms a step for its input" in text


def test_no_worker_is_named_for_uneven_steps_of_many(findings_of):
    (text,) = findings_of(uneven(800, 16, 0.25))
    assert re.match(
        r"Workers waited for one another \d\d % of the time throughout, now for one and now for another", text
    )
    assert "because their computing is uneven" in text


def test_uneven_input_of_many_is_named_as_the_reason(findings_of):
    busy, rng = uneven(800, 16, 0.02), np.random.default_rng(5)
    reads = rng.exponential(0.02, busy.shape) * (np.arange(16) > 0)  # by the last worker of a step, which is never 0
    texts = [text for text in findings_of(busy + reads, input_=reads) if "now for one and now for another" in text]
    assert texts
    assert all("because of their input" in text for text in texts)


def test_if_most_workers_are_slow_the_waiting_one_is_named(findings_of):
    (text,) = findings_of(uneven(400, 5, 0.02) * [1, 2, 2, 2, 2])
    assert re.match(r"Worker 0 finished early, and waited \d\d % of the time throughout", text)


def test_workers_are_compared_over_the_steps_of_their_membership(findings_of):
    busy = uneven(900, 3, 0.03)
    busy[:300, 2] = np.nan
    busy[300:600, 2] *= 2
    busy[600:, 2] = np.nan
    busy[300, 2] = 60.0  # getting ready, for which nobody waited
    (text,) = [text for text in findings_of(busy, fields={301: {"joined": [2]}}) if "wait" in text]
    assert text.startswith("Worker 2 made the others wait 5")
    np.testing.assert_allclose(steps_of(text), (301, 600), atol=6)


def test_one_worker_has_no_finding_about_waiting(findings_of):
    assert findings_of(uneven(300, 1, 0.3)) == []


# --- steps ------------------------------------------------------------------------------------------------------------


def test_waiting_for_input_on_all_workers_is_a_finding(findings_of):
    busy = uneven(500, 2, 0.03)
    input_ = np.zeros((500, 2))
    input_[100:200] = 0.014
    (text,) = findings_of(busy + input_, input_=input_)
    assert text.startswith("Input was 4")
    np.testing.assert_allclose(steps_of(text), (101, 200), atol=6)


def test_long_exchanges_and_hooks_are_findings(findings_of):
    exchanging = np.where(np.arange(400) < 200, 0.04, 1e-4)
    hooks = np.where(np.arange(400) < 200, 1e-4, 0.01)
    texts = findings_of(uneven(400, 1, 0.03), parts={"exchanging": exchanging, "hooks": hooks})
    assert [text.split()[0] for text in texts] == ["Exchanging", "Control"]
    np.testing.assert_allclose(steps_of(texts[1]), (201, 400), atol=6)


def test_intervals_of_one_kind_are_one_sentence(findings_of):
    exchanging = np.where(np.arange(600) % 200 < 60, 0.03, 1e-4)
    (text,) = findings_of(uneven(600, 1, 0.03), parts={"exchanging": exchanging})
    assert re.match(
        r"Exchanging took (\d\d to )?\d\d % of the step from step 1 to \d+, \d+ to \d+ and \d+ to \d+\.", text
    )


def test_compilation_is_a_finding_with_its_steps(findings_of):
    compiling = np.zeros(300)
    compiling[0], compiling[49] = 2.0, 1.1
    texts = findings_of(uneven(300, 2, 0.03), parts={"compiling": compiling})
    assert texts == ["Steps waited for a compiler for 3.1 s, 2 s of it in step 1 and the rest in 1 step up to step 50."]


def test_single_long_steps_are_findings_with_their_cause(findings_of):
    other = np.zeros(300)
    other[[120, 200]] = 1.0, 0.5
    lost = "worker 1 lost: rank 1 disconnected in message 1 of step 121; 1 ms to repair."
    (text,) = findings_of(uneven(300, 2, 0.03), parts={"other": other}, fields={121: {"lost": [lost]}})
    assert re.match(
        r"2 steps took more than 5 times as long .*: step 121 \(1\.0\d s, in which a worker was lost\)", text
    )
    assert "step 201 (5" in text
    assert "other things)" in text


def test_a_quiet_run_has_no_findings(findings_of):
    assert findings_of(uneven(1000, 4, 0.05)) == []


def test_where_it_went_adds_up(tmp_path):
    run = read_columns(record(tmp_path / "r", np.full((10, 1), 0.03), parts={"exchanging": 0.01}))
    assert where_it_went(run) == "75 % computing and 25 % exchanging"
