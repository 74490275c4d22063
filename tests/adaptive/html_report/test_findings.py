"""Findings are the problems put into a made-up record, and no others."""

from __future__ import annotations

import re

import numpy as np
import pytest

from adaptive.html_report.columns import read_columns
from adaptive.html_report.findings import excess, findings, medians, speed, where_it_went
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


@pytest.mark.parametrize("steps", [400, 500, 5000])
@pytest.mark.parametrize(("first", "end"), [(0.0, 0.2), (0.3, 0.7), (0.66, 1.0)])
def test_the_ends_of_a_stretch_without_noise_are_exact(steps, first, end):
    first, end = int(first * steps), int(end * steps)
    first, end = first + 3 * (first > 0), end - 3 * (end < steps)  # within a bin
    series = np.zeros(steps)
    series[first:end] = 0.5
    assert intervals(series, 0.1) == [(first, end, pytest.approx(0.5))]


def test_a_stretch_has_at_least_five_steps():
    assert intervals(np.repeat([0.0, 0.5, 0.0], [20, 5, 20]), 0.1) == [(20, 25, 0.5)]
    assert intervals(np.repeat([0.0, 0.5, 0.0], [20, 4, 20]), 0.1) == []
    assert [intervals(np.full(steps, 0.5), 0.1) for steps in (4, 5)] == [[], [(0, 5, 0.5)]]
    assert intervals(np.repeat([np.nan, 0.5, np.nan], 20), 0.1) == [(20, 40, 0.5)]  # where nothing is known


def test_the_level_of_two_stretches_that_are_one_is_their_mean():
    (found,) = intervals(np.repeat([0.0, 0.2, 0.3, 0.0], [100, 50, 150, 100]), 0.1)
    assert found == (100, 300, pytest.approx(0.275))
    assert [each.level for each in intervals(np.repeat([0.3, 0.05, 0.2], 60), 0.1)] == pytest.approx([0.3, 0.2])


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


@pytest.fixture
def found(tmp_path):
    """The findings of a made-up run."""

    def found(busy, **options):
        return findings(read_columns(record(tmp_path / "run.jsonl", busy, **options)))

    return found


def test_a_finding_has_its_steps_and_what_they_cost(found):
    busy = np.full((400, 4), 0.02)
    busy[100:200, 2] = 0.03
    (slow,) = found(busy)
    assert slow[1:] == (pytest.approx(1.0), 100, 200)
    assert slow.text.endswith("With it as fast as the others, the run would have taken 1 s (11 %) less.")
    (early,) = found(np.full((400, 5), 0.02) * [1, 2, 2, 2, 2])
    assert early[1:] == (pytest.approx(400 * 0.04 * 0.5 / 5, rel=0.01), 0, 400)
    assert "waited 50 % of the time throughout" in early.text


@pytest.mark.parametrize(
    ("one", "other", "steps"),
    [((0, 150, 1.5), (200, 350, 1.6), "from"), ((0, 400, 1.4), (0, 400, 3.0), "throughout")],
    ids=["at other times", "by other amounts"],
)
def test_workers_that_are_slow_for_reasons_of_their_own_have_a_sentence_each(found, one, other, steps):
    """The one that cost most comes first."""
    busy = np.full((400, 5), 0.02)
    for worker, (first, end, factor) in ((1, one), (3, other)):
        busy[first:end, worker] *= factor
    texts = [finding.text for finding in found(busy)]
    assert [text[:8] for text in texts] == ["Worker 3", "Worker 1"]
    assert all(f"of the time {steps}" in text for text in texts)
    assert ("With it as fast" in texts[1]) == (steps == "from")  # beside a slower one it costs nothing


def test_a_slow_worker_is_compared_with_workers_that_are_there(found):
    (slow,) = found(np.full((400, 4), 0.02) * [1, np.nan, np.nan, 2])
    assert "throughout: an example took it 2.0 times as long. With it" in slow.text


def test_two_slow_workers_have_one_finding_with_their_cost(found):
    (slow,) = found(np.full((400, 5), 0.02) * [1, 1.5, 1.6, 1, 1])
    assert slow.text.startswith(
        "Workers 1 and 2 made the others wait 38 % of the time throughout: an example took them"
    )
    assert "With them as fast as the others, the run would have taken 4.79 s (37 %) less." in slow.text


def test_a_worker_that_waits_for_a_slow_one_is_not_named_too(found):
    busy = np.full((400, 5), 0.02) * [1, 2, 2, 2, 4]
    assert [finding.text[:13] for finding in found(busy)] == ["Worker 4 made"]
    busy[100:, 4] = 0.04
    texts = [finding.text for finding in found(busy)]
    assert [text[:17] for text in texts] == ["Worker 4 made the", "Worker 0 finished"]
    assert steps_of(texts[1]) == (101, 400)


def beside_computing(busy):
    """Fields of steps in which computing takes 20 ms of each worker's busy time."""
    zeros, computing = [0.0] * len(busy[0]), [0.02] * len(busy[0])
    return {
        t: {"workers": {"input": zeros, "computing": computing, "busy": of_step.tolist()}}
        for t, of_step in enumerate(busy, 1)
    }


def test_a_worker_may_be_late_for_neither_computing_nor_input(found):
    busy = np.tile([0.02, 0.03, 0.02], (300, 1))
    (slow,) = found(busy, fields=beside_computing(busy))
    assert "Worker 1 made" in slow.text
    assert ": it spent 10 ms a step more than the others on neither computing nor input" in slow.text
    busy = uneven(300, 16, 0.25)
    (uneven_,) = found(busy, fields=beside_computing(busy))
    assert re.search(r"now for one and now for another\. None of them was steadily slower", uneven_.text)


@pytest.mark.parametrize(
    ("sizes", "factor", "why"),
    [
        ([64, 32, 32], 4, ": an example took it 2.0 times as long and it had 2.0 times as many examples. "),
        ([34, 32, 32], 1.13, ". "),
    ],
)
def test_a_slow_worker_may_have_both_reasons_or_none_that_matters(found, sizes, factor, why):
    (slow,) = found(np.full((300, 3), 0.02) * [factor, 1, 1], sizes=sizes)
    assert f" of the time throughout{why}With it as fast" in slow.text


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


@pytest.mark.parametrize(
    ("compiling", "where", "rows"),
    [
        ({0: 2.0}, "2 s, all of it in step 1", (0, 1)),
        ({20: 0.5, 49: 1.5}, "2 s, all of it in 2 steps up to step 50", (20, 50)),
        ({0: 1.0, 49: 1.0}, "2 s, 1 s of it in step 1 and the rest in 1 step up to step 50", (0, 50)),
    ],
)
def test_waits_for_a_compiler_are_listed_with_their_steps(found, compiling, where, rows):
    seconds = np.zeros(300)
    seconds[[*compiling]] = [*compiling.values()]
    (compiled,) = found(np.full((300, 2), 0.02), parts={"compiling": seconds})
    assert compiled == (f"Steps waited for a compiler for {where}.", pytest.approx(2), *rows)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, ", other things"),
        ({120: {"lost": ["rank 1"]}, 122: {"joined": [1]}}, ", other things"),
        ({121: {"joined": [0, 1]}}, ", in which workers 0 and 1 joined"),
        ({121: {"notes": ["a note"]}}, ", other things"),
    ],
)
def test_a_long_step_has_its_own_cause(found, fields, why):
    other = np.where(np.arange(300) == 120, 1.0, 0.0)
    (long,) = found(np.full((300, 2), 0.02), parts={"other": other}, fields=fields)
    text = f"1 step took more than 5 times as long as nearby steps: step 121 (1.02 s{why})."
    assert long == (text, pytest.approx(1.0), 120, 121)


def test_of_many_long_steps_the_longest_are_named(found):
    """Compared with steps nearby."""
    busy = np.repeat([[0.02], [0.2]], [300, 300], axis=0)
    rows = [10, 60, 110, 160, 210, 260]
    busy[rows, 0] = [0.5, 0.6, 0.7, 0.8, 0.3, 0.9]
    (long,) = found(busy)
    assert long.text == (
        "6 steps took more than 5 times as long as nearby steps; the longest were step 261 (900 ms, computing), step "
        "161 (800 ms, computing), step 111 (700 ms, computing), step 61 (600 ms, computing) and step 11 (500 ms, "
        "computing)."
    )
    assert long[1:] == (pytest.approx(3.8 - 6 * 0.02), 10, 261)


@pytest.mark.parametrize(("seconds", "listed"), [(0.15, 0), (0.25, 1)])
def test_what_cost_less_than_a_hundredth_of_the_run_is_no_finding(found, seconds, listed):
    other = np.where(np.arange(1000) == 500, seconds, 0.0)
    assert len(found(np.full((1000, 1), 0.02), parts={"other": other})) == listed


def test_the_longest_of_many_intervals_are_named(found):
    exchanging = np.zeros(400)
    for first, length in ((0, 20), (50, 20), (100, 12), (150, 20), (200, 20), (250, 12), (300, 20)):
        exchanging[first : first + length] = 0.03
    exchanging[300:320] = 0.06
    (finding,) = found(np.full((400, 1), 0.02), parts={"exchanging": exchanging})
    assert finding.text.startswith(
        "Exchanging took 60 to 75 % of the step from step 1 to 20, 51 to 70, 151 to 170, 201 to 220 and 301 to 320, "
        "and in 2 shorter intervals."
    )
    assert finding[1:] == (pytest.approx(exchanging.sum()), 0, 320)


def test_a_small_part_is_left_out_of_where_the_time_went(tmp_path):
    parts = {"exchanging": 0.05, "hooks": 0.002, "other": 0.0005}
    run = read_columns(record(tmp_path / "r", np.full((10, 1), 0.046), parts=parts))
    assert where_it_went(run) == "51 % exchanging, 47 % computing and 2 % hooks"
    assert speed(run) == "325"
