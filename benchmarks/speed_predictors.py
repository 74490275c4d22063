"""Compare predictors of a worker's speed with and without the free resources of the machine as inputs: ARX and NARX.

    python benchmarks/speed_predictors.py --write

Predictors of `controllers` run one step ahead on made-up speeds of a machine with other users: the shares of processor
and memory jump, sensors have 2 % noise, and the speed 3 % noise.
"""

from __future__ import annotations

import argparse

import numpy as np
from _measure import Spread, alternate, report

import controllers as ctrl

SEEDS, STEPS, LEARNT = 5, 2000, 500
PREDICTORS = {
    "memoryless": ctrl.published.memoryless(),
    "moving average 0.2": ctrl.published.moving_average(0.2),
    "moving average 0.5": ctrl.published.moving_average(0.5),
    "AR(2)": ctrl.published.arx(),
    "ARX(2)": ctrl.published.arx(),
    "NARX(2)": ctrl.published.narx(),
    "best of ARX, NARX, average": ctrl.published.best_of(
        ctrl.published.moving_average(), ctrl.published.arx(), ctrl.published.narx()
    ),
}
BLIND = ("AR(2)",)  # shown no inputs
BASE = "moving average 0.5"


# --- series -----------------------------------------------------------------------------------------------------------


def made_up(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return synthetic speeds, shape=(1, STEPS), and inputs, shape=(1, STEPS, 2)."""
    rng = np.random.default_rng(seed)
    cpu, memory = np.empty(STEPS), np.empty(STEPS)
    level = room = 1.0
    for k in range(STEPS):
        level = rng.uniform(0.2, 1) if rng.random() < 0.04 else level
        room = rng.uniform(0.1, 1) if rng.random() < 0.02 else room
        cpu[k], memory[k] = level, room
    speed = 100 * cpu**0.8 * (1 - 0.5 * np.exp(-memory / 0.2)) * (1 + 0.03 * rng.standard_normal(STEPS))
    seen = np.stack([cpu, memory], axis=1) * (1 + 0.02 * rng.standard_normal((STEPS, 2)))
    return speed[None], seen[None]


def predictions(name: str, speeds: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    """Return the prediction for each step from those before it; shape as `speeds`."""
    if name in BLIND:
        inputs = inputs[:, :, :0]
    predictor = PREDICTORS[name]
    state, latest = predictor.init(len(speeds), inputs.shape[2]), np.full(len(speeds), np.nan)
    said = np.empty(speeds.shape)
    for k in range(speeds.shape[1]):
        said[:, k], state = predictor.update(state, latest, inputs[:, k])
        latest = speeds[:, k]
    return said


def error(said: np.ndarray, speeds: np.ndarray) -> float:
    """Return the root mean square error over the mean, after the first LEARNT steps."""
    off = (said - speeds)[:, LEARNT:]
    return float(np.sqrt((off**2).mean()) / speeds[:, LEARNT:].mean())


# --- results ----------------------------------------------------------------------------------------------------------


def cost(workers: int = 8, rounds: int = 400) -> dict[str, Spread]:
    """Return the seconds per step of each predictor in turn, for a number of workers."""
    speeds, inputs = (np.concatenate(parts) for parts in zip(*(made_up(s) for s in range(workers)), strict=True))
    states, at = (
        {n: p.init(workers, 0 if n in BLIND else 2) for n, p in PREDICTORS.items()},
        dict.fromkeys(PREDICTORS, 0),
    )

    def step(name: str) -> None:
        k = at[name] = at[name] + 1
        seen = inputs[:, k, :0] if name in BLIND else inputs[:, k]
        _, states[name] = PREDICTORS[name].update(states[name], speeds[:, k - 1], seen)

    calls = {name: lambda name=name: step(name) for name in PREDICTORS}
    return {name: Spread.of(sample) for name, sample in alternate(calls, rounds, warmup=100).items()}


def main() -> None:
    """Evaluate and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    series = [made_up(seed) for seed in range(SEEDS)]
    errors = {name: np.array([error(predictions(name, *one), one[0]) for one in series]) for name in PREDICTORS}
    seconds = cost()
    rows = [
        {
            "predictor": name,
            "error": f"{np.mean(own):.3f} ± {np.std(own):.3f}",
            "of average 0.5": f"{np.mean(own / errors[BASE]):.2f}",
            "worst of 5 seeds": f"{np.max(own / errors[BASE]):.2f}",
            "µs a step, 8 workers": f"{1e6 * seconds[name].median:.0f}",
        }
        for name, own in errors.items()
    ]
    notes = [
        f"One step ahead; root mean square error over mean speed, behind the first {LEARNT} of {STEPS} steps. AR(2) "
        "sees no inputs.",
    ]
    title = "Knowing the machine, against knowing the past: errors of predicted speeds"
    report(title, rows, "speed_predictors.md" if args.write else None, notes)


if __name__ == "__main__":
    main()
