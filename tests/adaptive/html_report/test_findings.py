"""Where the time went: one share of waiting on a page; the problems of a made-up record are found, and no others."""

from __future__ import annotations

import re

import numpy as np
import pytest

from adaptive.html_report.columns import Columns
from adaptive.html_report.findings import findings, slow_phases

from .made_up import record, uneven


@pytest.fixture
def read(tmp_path):
    """Return a made-up run."""

    def read(busy, **options):
        path = record(tmp_path / "run.jsonl", busy, **options)
        return Columns(path)

    return read


@pytest.fixture
def texts(read):
    return lambda busy, **options: [finding.text for finding in findings(read(busy, **options))]


def about_waiting(texts):
    return [text for text in texts if "waited" in text]


@pytest.mark.parametrize("waited", [0.0, 0.01])
@pytest.mark.parametrize("slowest", [0, 2])
def test_waiting_is_the_mean_of_the_workers(read, slowest, waited):
    """Of one message, and of several, in which even the last worker waits."""
    busy = np.full((200, 4), 0.02)
    busy[:, slowest] = 0.04
    run = read(busy, waited=waited, parts={"exchanging": 0.002})
    steps, causes, mean = run.by_step, run.ledger.seconds, 0.75 * 0.02 + waited
    assert steps["waiting"][1:] == pytest.approx(mean, rel=1e-4)
    assert sum(steps.values()) == pytest.approx(run.seconds)
    assert steps["computing"][1:] == pytest.approx(0.25 * 0.02 + 0.02, rel=1e-4)
    assert causes["waiting"] == pytest.approx(200 * mean, rel=0.02)
    assert sum(causes.values()) == pytest.approx(run.seconds.sum() + 2)  # 2 s until the program was built
    assert np.nanmean(run.workers["waiting"], 0).mean() == pytest.approx(mean, rel=1e-4)
    assert run.ledger.goodput == pytest.approx((causes["computing"] + causes["exchanging"]) / sum(causes.values()))


def test_input_of_other_workers_is_in_the_mean(read):
    run = read(np.full((100, 4), 0.02), input_=[0.0, 0.01, 0.01, 0.0])
    assert run.ledger.seconds["input"] == pytest.approx(99 * 0.005)
    assert run.by_step["input"][0] == 0  # of the first step only the recorder's seconds count


@pytest.mark.parametrize(("n", "spread"), [(2, 0.05), (2, 0.3), (5, 0.2), (16, 0.1)])
def test_workers_that_differ_by_chance_are_not_blamed(texts, n, spread):
    assert not [text for text in texts(uneven(600, n, spread, seed=n)) if "waited for worker" in text]


def test_a_slow_worker_is_named_with_its_steps_why_and_what_it_cost(texts):
    busy = uneven(1200, 4, 0.05)
    usual = busy.max(1).sum()
    busy[400:900, 2] *= 1.5
    (text,) = about_waiting(texts(busy))  # the rest of the waiting is not worth a line
    assert "waited for worker 2" in text
    first, last = map(int, re.search(r"from step (\d+) to (\d+)", text.replace(",", "")).groups())
    np.testing.assert_allclose((first, last), (401, 900), atol=30)
    assert ": an example took 1.5 times as long." in text
    less, share = map(float, re.search(r"would have taken ([\d.]+) s \((\d+) %\) less", text).groups())
    assert less == pytest.approx(busy.max(1).sum() - usual, rel=0.15)
    assert share == pytest.approx(100 * less / (2 + busy.max(1).sum()), abs=1)


def test_workers_of_one_host_are_named_together(read):
    busy = uneven(2000, 16, 0.03)
    busy[1000:1500, 8:12] *= 1.6
    busy[300:500, 8:12] *= 1.6
    found = [(phase.workers, phase.first, phase.end) for phase in slow_phases(read(busy))]
    assert found == [([8, 9, 10, 11], 1000, 1500), ([8, 9, 10, 11], 300, 500)]  # by what they cost


@pytest.mark.parametrize(
    ("busy", "options", "why"),
    [
        ([2, 1, 1], {"sizes": [64, 32, 32]}, "waited for worker 0 throughout: 2.0 times as many examples."),
        ([2, 1, 1], {"input_": [0.02, 0.0, 0.0]}, "worker 0 throughout, for their input: 20"),
        ([1, 1.4], {}, "waited for worker 1 throughout: an example took 1.4 times as long."),
    ],
)
def test_the_reason_is_named(texts, busy, options, why):
    assert why in about_waiting(texts(uneven(300, len(busy), 0.01) * busy, **options))[0]


def test_a_worker_that_works_on_something_else_is_named(tmp_path, texts):
    busy = np.full((300, 3), 0.02) * [1, 1, 2]
    micro = {"input": [0] * 3, "computing": [20000] * 3, "busy": [20000, 20000, 40000], "together": 40000}
    (text, *_) = about_waiting(texts(busy, fields={step: {"microseconds": micro} for step in range(1, 301)}))
    assert "worker 2 throughout, which spent 20 ms a step more on neither computing nor input" in text


def test_workers_are_compared_in_the_steps_of_their_membership(read):
    busy = uneven(900, 3, 0.03)
    busy[:300, 2] = busy[600:, 2] = np.nan
    busy[300:600, 2] *= 2
    busy[300, 2] = 60.0  # getting ready, for which nobody waited
    (phase,) = slow_phases(read(busy, fields={301: {"joined": [2]}}))
    assert phase.workers == [2]
    np.testing.assert_allclose((phase.first, phase.end), (300, 600), atol=25)


def test_no_worker_is_named_for_uneven_steps_of_many(texts):
    (text,) = about_waiting(texts(uneven(800, 16, 0.25)))
    assert re.match(r"Workers waited \d\d % of the run for one another, with none steadily slower", text)


def test_the_costliest_causes_come_first_with_advice(texts):
    busy = np.full((100, 1), 0.03)
    found = texts(busy, input_=0.01, parts={"hooks": 0.004, "exchanging": 0.05, "other": 1e-5})
    assert [text.split()[0] for text in found[::4]] == ["Exchanging", "Hooks"]
    assert any(text.startswith("Input took") and "num_threads=" in text for text in found[1:4])
    assert "every=" in found[4]


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (4, 2)])
def test_short_runs_have_no_slow_phases(read, shape):
    run = read(np.full(shape, 0.02))
    assert slow_phases(run) == []
    assert run.ledger.seconds["unaccounted"] == pytest.approx(0, abs=1e-5)
