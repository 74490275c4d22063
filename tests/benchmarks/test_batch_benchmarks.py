"""The benchmarks of batch rules: what a bandit plays, and how long a simulated run takes."""

from __future__ import annotations

import importlib
import sys

import numpy as np

import controllers as ctrl
from tests.mpirun import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))  # as it is for a script
simulated, bandits = (importlib.import_module(name) for name in ("best_rule_simulated", "_bandit"))


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
