"""The benchmarks of noise scales: monitors do not change training, and the tables have the measurements."""

from __future__ import annotations

import importlib
import math
import sys

import jax
import numpy as np
import pytest

from tests.mpirun import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))  # as it is for a script
cost, critical, timed = (
    importlib.import_module(name) for name in ("cost_of_monitors", "critical_batch", "_timed_models")
)


@pytest.fixture
def usual_promotion():
    """Let optax and the models promote dtypes and ranks, as in every user's program."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.usefixtures("usual_promotion")
@pytest.mark.long
def test_all_monitors_see_the_same_training_and_know_a_noise_scale():
    losses = {}
    model = timed.perceptron("perceptron", 8)
    for name in cost.MONITORS:
        with cost.program(model, name) as program:
            *_, last = program.run(steps=4)
        losses[name] = float(last.metrics["loss"])
        noise = last.metrics["noise"]
        if name != cost.NOTHING:
            scales = noise.values() if isinstance(noise, dict) else [noise]
            assert all(float(one.trace) > 0 for one in scales)
    np.testing.assert_allclose(list(losses.values()), losses[cost.NOTHING], rtol=1e-5)


def test_a_layer_is_named_by_its_path():
    assert cost.layer(("params", "Dense_0", "kernel")) == "params/Dense_0"


@pytest.mark.usefixtures("usual_promotion")
@pytest.mark.long
def test_a_moment_has_a_critical_batch_and_all_noise_scales():
    task = critical.digits()._replace(
        moments=(6,), examples=256, test={k: v[:64] for k, v in critical.digits().test.items()}
    )
    (row,) = critical.measured(task, seed=0)
    assert row["seen"] == 6 * task.batch
    assert row["critical"] > 0
    assert all(row[name] >= 0 for name in critical.NAMES)


def test_tables_have_medians_and_ratios_over_seeds():
    rows = [
        {"task": "t", "seen": 80, "critical": 10.0 * (seed + 1)} | dict.fromkeys(critical.NAMES, 60.0)
        for seed in range(3)
    ]
    (row,) = critical.ratios(rows)
    assert row["critical batch"] == "20 (10 – 30)"
    assert row["examples"] == "3 (2 – 6)"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([math.nan, math.nan], "–"),
        ([1.0, math.nan, 3.0], "2 (1 – 3), 2 of 3"),
        ([4.0, 6.0, math.inf], "6 (4 – inf)"),
        ([1234.0], "1,234 (1,234 – 1,234)"),
    ],
)
def test_missing_measurements_are_listed(values, text):
    assert critical.middle(values) == text
