"""The benchmarks of batch rules: when a target is reached, what it costs, and which learning rate is the best."""

from __future__ import annotations

import importlib
import math
import sys

import numpy as np
import pytest

import controllers as ctrl
from tests.mpirun import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))  # as it is for a script
static, simulated, bandits = (
    importlib.import_module(name) for name in ("best_static_batch", "best_rule_simulated", "_bandit")
)


def course(*losses, batch=8):
    return [(16 * (k + 1), loss, [[batch, 1], [2 * batch, 1]]) for k, loss in enumerate(losses)]


def test_a_target_is_reached_by_the_median_of_three_losses():
    assert static.hit(course(3.0, 0.9, 2.0, 0.8, 0.9), target=1.0) == 3
    assert static.hit(course(3.0, 0.9, 2.0, 1.8, 1.9), target=1.0) is None


def test_a_total_counts_the_steps_of_each_batch():
    assert static.total(course(1.0, 1.0, 1.0), 1, lambda batch: batch) == 2 * (8 + 16)
    assert static.total(course(1.0, 1.0, 1.0), 2, lambda batch: 1) == 6
    assert static.total(course(1.0), None, lambda batch: 1) == math.inf
    assert static.GPUS.seconds(128) == pytest.approx(5.896e-3 + 16 * 0.5931e-3 + 1.28e-3)


@pytest.mark.parametrize("best", [0.25, 1.0, 8.0])
def test_the_learning_rate_is_searched_both_ways_and_dear_runs_end_early(best, tmp_path, monkeypatch):
    monkeypatch.setattr(static, "FOUND", tmp_path / "runs.json")
    task = static.task("digits")._replace(target=1.0)

    def marks(lr, seed):
        needed = 5 + 4 * abs(math.log2(lr / best))
        for k in range(100):
            yield 16 * (k + 1), 0.5 if k >= needed else 2.0, [[16, 1]]

    store = static.Store(minutes=1.0)
    way = static.tuned(store, task, "a way", 1.0, float, marks)
    assert way.lr == best
    assert [len(course) for course in way.courses] == [7] * 3
    longest = max(len(run) for run in store.runs.values())
    assert longest <= 7 + 4 * abs(math.log2(best)) + 1
    again = static.tuned(static.Store(minutes=0.0), task, "a way", 1.0, float, marks)  # all from the file
    assert again.totals(1.0, float).tolist() == way.totals(1.0, float).tolist()


def test_a_bandit_plays_the_rule_with_the_most_progress_most_often():
    draw, bandit, clock, loss, played = np.random.default_rng(0), bandits.Bandit(3, window=320), 0.0, 5.0, [0, 0, 0]
    for _ in range(6000):
        clock += 0.1
        loss -= 1e-4 * (1 + 2 * (bandit.rule == 1))
        played[bandit.rule] += 1
        bandit.see(32, clock, loss + 1e-4 * draw.standard_normal())
    assert played[1] > max(played[0], played[2]) > 0


def test_a_simulated_run_takes_longer_with_a_batch_that_is_too_small():
    rules = simulated.rules()
    small, large = (simulated.alone(rules[f"batch {batch}"], 1500.0, 0.05, 0)[0] for batch in (128, 512))
    goodput = 32, ctrl.goodput_batch(min_batch=32, max_batch=2048)
    assert simulated.alone(goodput, 1500.0, 0.05, 0)[0] < large < small
