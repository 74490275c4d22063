"""The benchmark of batch rules: what a simulated run takes."""

from __future__ import annotations

import importlib
import sys

import controllers as ctrl
from tests.mpirun import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))  # as it is for a script
simulated = importlib.import_module("best_rule_simulated")


def test_a_simulated_run_takes_longer_with_a_batch_that_is_too_small():
    rules = simulated.rules()
    small, large = (simulated.to_goal(rules[f"batch {batch}"], 1500.0, 0.05, 0) for batch in (128, 512))
    goodput = 32, ctrl.goodput_batch(min_batch=32, max_batch=2048)
    assert simulated.to_goal(goodput, 1500.0, 0.05, 0) < large < small
