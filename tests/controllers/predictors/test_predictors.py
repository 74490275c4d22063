"""Speed predictors on a synthetic machine that others use too."""

from __future__ import annotations

import numpy as np
import pytest

import controllers as ctrl

MACHINES, STEPS, LEARNT = 3, 1000, 500


def synthetic(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Speeds and inputs: processor share and memory jump, and are measured with 2 % noise; speed has 3 % of its own."""
    rng = np.random.default_rng(seed)
    cpu, memory = np.empty(STEPS), np.empty(STEPS)
    level, room = 1.0, 1.0
    for k in range(STEPS):
        level = rng.uniform(0.2, 1) if rng.random() < 0.04 else level
        room = rng.uniform(0.1, 1) if rng.random() < 0.02 else room
        cpu[k], memory[k] = level, room
    speed = 100 * cpu**0.8 * (1 - 0.5 * np.exp(-memory / 0.2)) * (1 + 0.03 * rng.standard_normal(STEPS))
    return speed, np.stack([cpu, memory], axis=1) * (1 + 0.02 * rng.standard_normal((STEPS, 2)))


MADE = [synthetic(seed) for seed in range(MACHINES)]
SPEEDS, INPUTS = np.stack([s for s, _ in MADE]), np.stack([u for _, u in MADE])


def predictions(predictor: ctrl.published.Predictor, speeds=SPEEDS, inputs=INPUTS) -> np.ndarray:
    """What is predicted for each step before it; shape=(machines, steps)."""
    state = predictor.init(len(speeds), inputs.shape[2])
    said = np.empty(speeds.shape)
    latest = np.full(len(speeds), np.nan)
    for k in range(speeds.shape[1]):
        said[:, k], state = predictor.update(state, latest, inputs[:, k])
        latest = speeds[:, k]
    return said


def error(said: np.ndarray) -> float:
    """Root mean square over mean."""
    off = said[:, LEARNT:] - SPEEDS[:, LEARNT:]
    return float(np.mean(np.sqrt((off**2).mean(axis=1)) / SPEEDS[:, LEARNT:].mean(axis=1)))


@pytest.mark.parametrize("predictor", [ctrl.published.arx(), ctrl.published.narx()], ids=["arx", "narx"])
def test_knowing_the_machine_beats_knowing_its_past(predictor):
    assert error(predictions(predictor)) < 0.7 * error(predictions(ctrl.published.moving_average(0.5)))


def test_narx_learns_nonlinear_series():
    """Were the network never chosen, or no better than a line, this would fail."""
    rng = np.random.default_rng(0)
    inputs = rng.uniform(-1, 1, (1, STEPS, 1))
    speeds = 100 * (1 + 0.8 * inputs[:, :, 0] ** 2)
    off = {
        p.name: predictions(p, speeds, inputs)[:, LEARNT:] - speeds[:, LEARNT:]
        for p in (ctrl.published.arx(), ctrl.published.narx())
    }
    assert np.std(off["narx"]) < 0.3 * np.std(off["arx"])


def test_memoryless_and_moving_average():
    speeds = np.array([[10.0, 20.0, np.nan, 40.0, 40.0]])
    none = np.zeros((1, 5, 0))
    np.testing.assert_array_equal(predictions(ctrl.published.memoryless(), speeds, none), [[np.nan, 10, 20, 20, 40]])
    np.testing.assert_array_equal(
        predictions(ctrl.published.moving_average(0.5), speeds, none), [[np.nan, 10, 15, 15, 27.5]]
    )


def test_best_of_follows_the_most_accurate_predictor():
    def constant(value):
        return ctrl.published.Predictor(
            lambda n, m: np.zeros(0), lambda s, v, u: (np.full(len(v), value), s), f"{value}"
        )

    speeds = np.repeat([[10.0, 20.0]], 50, axis=1)
    said = predictions(ctrl.published.best_of(constant(10.0), constant(20.0), memory=5), speeds, np.zeros((1, 100, 0)))
    assert said[0, 0] == 10  # the first, until there is a record
    speeds = np.concatenate([np.full((1, 50), 10.0), np.full((1, 50), 20.0)], axis=1)
    said = predictions(ctrl.published.best_of(constant(10.0), constant(20.0), memory=5), speeds, np.zeros((1, 100, 0)))
    assert (said[0, 5:50] == 10).all()
    assert (said[0, 60:] == 20).all()


# `best_of` and all others are part of the last one.
ALL = {"arx": ctrl.published.arx(), "narx": ctrl.published.narx()}


@pytest.mark.parametrize("name", ALL)
def test_holes_are_bridged(name):
    rng = np.random.default_rng(1)
    speeds = np.where(rng.random(SPEEDS.shape) < 0.2, rng.choice([np.nan, np.inf, 0.0, -1.0], SPEEDS.shape), SPEEDS)
    inputs = np.where(rng.random(INPUTS.shape) < 0.2, np.nan, INPUTS)
    speeds[0] = np.nan  # never measured
    with np.errstate(all="raise", under="ignore"):
        said = predictions(ALL[name], speeds[:, :300], inputs[:, :300])
    assert np.isnan(said[0]).all()
    assert (said[1:, 10:] > 0).all()
    assert (said[1:, 10:] < 1000).all()


@pytest.mark.parametrize("name", ALL)
def test_workers_are_predicted_each_for_itself(name):
    together = predictions(ALL[name], SPEEDS[:, :150], INPUTS[:, :150])
    alone = predictions(ALL[name], SPEEDS[1:2, :150], INPUTS[1:2, :150])
    np.testing.assert_allclose(together[1:2], alone, rtol=1e-6)


def test_impossible_settings_are_refused():
    for wrong in (
        lambda: ctrl.published.moving_average(0),
        lambda: ctrl.published.arx(lags=0),
        lambda: ctrl.published.narx(steps=0),
        lambda: ctrl.published.narx(width=0),
        ctrl.published.best_of,
    ):
        with pytest.raises(ValueError, match=r"must|at least"):
            wrong()
