"""On OmniLearn's schedule its own rule is 1.56 times as fast as equal batches, and `balance` 1.80 times, the maximum.

    python benchmarks/simulated_omnilearn.py

OmniLearn (TPDS 2025) moves 48 cores between four workers, HL1, 2, 4, 8, 8, 4, 2, 1, every five epochs, and adjusts
batches once per epoch. On the same schedule are simulated OmniLearn's rule as in its code, `proportional` with its
settings and with this library's, and `balance`; compared with equal batches, and with the exact split of each stage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from _measure import command_line, middle, report, sizes_text, table
from _scenarios import HL_CORES, HL_STAGES, gain, over

import controllers as ctrl
from adaptive.base.decision import Decision, Observation
from controllers._policy import Policy
from controllers.simulate import Hooked, Simulation, scenario, simulate
from controllers.simulate._line_up import equal

WORKERS = 4
EPOCH = 100  # steps
STAGE = 5 * EPOCH  # ResNet-18's and GPT-2's
STEPS = STAGE * len(HL_STAGES)
DEAD_BAND, LEAST, MOST = 0.2, 16, 96  # OmniLearn's


class OmniLearnState(NamedTuple):
    """The sum of each worker's times in this epoch."""

    total: np.ndarray  # shape=(n,), seconds
    steps: np.ndarray  # shape=(n,)


def omnilearn(first_global_batch: int = 32 * WORKERS) -> Policy:
    """OmniLearn's rule for BSP, which `proportional` does not implement.

    Runs once per epoch (the hook's `every`) on each worker's mean time in the epoch. A worker gets the batch of
    `proportional_step` if this differs from its old batch by at least 20 % of the new one. Bounds follow; the examples
    that they remove, divided by n, are added to every worker's batch. The remaining difference of the sum, divided by
    n, is subtracted from each. All values are rounded up, so up to n - 1 examples too many remain, and a bound may be
    exceeded.
    """

    def init(n_workers: int) -> OmniLearnState:
        return OmniLearnState(np.zeros(n_workers), np.zeros(n_workers))

    def update(observation: Observation, state: OmniLearnState) -> tuple[Decision | None, OmniLearnState]:
        seconds = np.asarray(observation.values[0], np.float64)
        seen = np.isfinite(seconds)
        state = OmniLearnState(state.total + np.where(seen, seconds, 0.0), state.steps + seen)
        if not observation.due or not state.steps.all():
            return None, state
        sizes = omnilearn_sizes(np.asarray(observation.batch_sizes), state.total / state.steps, first_global_batch)
        asked = Decision(global_batch=int(sizes.sum()), shares=tuple(map(float, sizes)))
        same = tuple(sizes.tolist()) == observation.batch_sizes
        return None if same else asked, init(len(sizes))

    return Policy(init, update, "omnilearn")


def omnilearn_sizes(sizes: np.ndarray, seconds: np.ndarray, global_batch: int) -> np.ndarray:
    """Return the batches of the next epoch; int64, shape=(n,)."""
    n = len(sizes)
    wanted = sizes * seconds.mean() / seconds
    wanted = np.where(np.abs(wanted - sizes) / wanted >= DEAD_BAND, wanted, sizes)
    bounded = np.clip(wanted, LEAST, MOST)
    shared = np.ceil(bounded) + np.ceil((wanted - bounded) / n).sum()
    return np.ceil(shared - (shared.sum() - global_batch) / n).astype(np.int64)


POLICIES: dict[str, tuple[Any, int]] = {  # what makes it, every
    "equal": (equal, 1),
    "OmniLearn's rule": (omnilearn, EPOCH),
    "proportional, set as OmniLearn": (
        lambda: ctrl.published.proportional(dead_band=DEAD_BAND, drop=None),  # `run` sets its bounds
        EPOCH,
    ),
    "proportional, every epoch": (lambda: ctrl.published.proportional(drop=None), EPOCH),
    "proportional": (ctrl.published.proportional, 1),
    "proportional, learns no bounds": (lambda: ctrl.published.proportional(drop=None), 1),
    "balance, every epoch": (ctrl.balance, EPOCH),
    "balance": (ctrl.balance, 1),
}
LISTED = ("equal", "OmniLearn's rule", "proportional", "proportional, learns no bounds", "balance")


def run(name: str, seed: int = 0, steps: int = STEPS) -> Simulation:
    """Run a policy by name from equal batches on the schedule."""
    make, every = POLICIES[name]
    case = scenario("omnilearn", WORKERS, steps, seed)
    hooks = [Hooked(make(), ("seconds",), every)]
    cluster = replace(case.cluster, lower=LEAST, upper=MOST) if name.endswith("as OmniLearn") else case.cluster
    done = simulate(hooks, cluster, case.global_batch, steps, seed=seed)
    return replace(done, limits=case.cluster.limits)  # the best split has no bounds


def overall(runs: dict[str, list[Simulation]]) -> list[dict[str, str]]:
    """Return rows of policies over the whole schedule."""
    return [
        {
            "policy": name,
            "time / ideal": middle([over(sim) for sim in sims]),
            "gain over equal": middle([gain(*pair) for pair in zip(sims, runs["equal"], strict=True)]),
            "adjustments": middle([len(sim.adjustments) for sim in sims], 0),
            "global batch": middle([sim.global_batch[-1] for sim in sims], 0),
            "sizes, last step at HL8": sizes_text(sims[0].sizes[5 * STAGE - 1]),
        }
        for name, sims in runs.items()
    ]


def by_stage(runs: dict[str, list[Simulation]]) -> list[dict[str, str]]:
    """Return rows of stages: per policy the gain over equal batches, in the whole stage and at its end."""
    rows = []
    for number, level in enumerate(HL_STAGES):
        steps = slice(number * STAGE, (number + 1) * STAGE)
        bound = np.mean(HL_CORES[level]) / np.min(HL_CORES[level])
        row = {"stage": f"{number + 1}: {level}", "mean(X) / min(X)": f"{bound:.2f}"}
        row["exact split"] = middle([over(sim, steps) for sim in runs["equal"]])
        for name in LISTED[1:]:
            row[name] = middle([gain(*pair, steps) for pair in zip(runs[name], runs["equal"], strict=True)])
        last = slice(steps.stop - EPOCH, steps.stop)
        for name in ("OmniLearn's rule", "balance"):
            row[f"{name}, last epoch / ideal"] = middle([over(sim, last) for sim in runs[name]])
        rows.append(row)
    return rows


def main() -> None:
    """Measure and report."""
    args = command_line(__doc__, seeds=3).parse_args()
    runs = {name: [run(name, seed) for seed in range(args.seeds)] for name in POLICIES}
    notes = [
        f"{STEPS} steps of five epochs of {EPOCH} in each of eight stages, 5 % jitter, {args.seeds} seeds: median "
        "(least – largest). `ideal` has each stage's exact split from its first step on.",
        "## Gain over equal batches, by stage",
        table(by_stage(runs)),
        "`exact split` is what can be had of mean(X) / min(X) under jitter, and with 5 % of a step that do not depend "
        "on the batch. The last two columns are on sizes as they are in a stage's last epoch.",
    ]
    report("OmniLearn's schedule, simulated", overall(runs), args.write, notes)


if __name__ == "__main__":
    main()
