"""A worker that becomes slow is found within 15 steps, without false alarms, and a swap removes its cost.

    python benchmarks/slow_workers.py [--runs 1000] [--write]       # about 4 minutes of one core

First the detector, on simulated times of eight workers at 5 % jitter: false alarms in quiet steps, and steps until it
reports a worker that has become slower by a factor. Then `mitigate_slow_workers` on simulated clusters with one worker
in reserve, compared with a fixed split for healthy workers and with `balance`, whose probation is included. The removed
share of the slowdown is relative to the slowdown of the fixed split over a run without slow workers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from _measure import report

import controllers as ctrl
from controllers.simulate import Cluster, Hooked, jitter, noises, scenario, simulate, stages, stragglers
from controllers.simulate._line_up import equal
from controllers.timing.change_points import ChangePoints

WORKERS, JITTER, AT, STEPS = 8, 0.05, 150, 600
SLOW = 3


# --- the detector -----------------------------------------------------------------------------------------------------


def onsets(seed: int, steps: int, factor: float = 1.0, deviation: float = JITTER) -> list[tuple[int, int]]:
    """Return the steps of the detector's reports, and the workers; one worker is `factor` times slower from `AT` on."""
    rng = np.random.default_rng([seed, round(100 * factor)])
    seconds = rng.uniform(0.5, 2.0, WORKERS) * np.exp(deviation * rng.standard_normal((steps, WORKERS)))
    seconds[AT:, SLOW] *= factor
    state, found = ChangePoints.init(WORKERS), []
    for step, row in enumerate(seconds, 1):
        state, new = state.observe(row)
        found += [(step, onset.worker_slot) for onset in new]
    return found


def detection(runs: int) -> list[dict[str, str]]:
    rows = []
    for factor in (1.15, 1.3, 2.0, 4.0):
        late, false = [], 0
        for seed in range(runs):
            found = onsets(seed, AT + 60, factor)
            hits = [step - AT for step, slot in found if slot == SLOW and step > AT]
            false += len(found) - len(hits)
            late.append(hits[0] if hits else np.inf)
        middle, most = np.percentile(late, [50, 99], method="higher")
        rows.append(
            {
                "times as slow": f"{factor:g}",
                "found within 15 steps": f"{100 * np.mean(np.array(late) <= 15):.1f} %",
                "steps, median": f"{middle:g}",
                "99 %": f"{most:g}" if np.isfinite(most) else "not found",
                "false alarms": f"{false} in {runs} runs",
            }
        )
    return rows


# --- the policy -------------------------------------------------------------------------------------------------------


def _hit(factor: float) -> np.ndarray:
    return np.where(np.arange(WORKERS + 1) == SLOW, factor, 1.0)


def _equal(factor: float, fixed: float = 0.03) -> Cluster:
    times = ctrl.timing.BatchTime(np.full(WORKERS + 1, 1e-3), np.full(WORKERS + 1, fixed))
    trace = stages({0: 1.0, STEPS // 4: _hit(factor)}, WORKERS + 1)
    return Cluster(times, trace, jitter(JITTER), overhead=0.005)


def _from(name: str, seed: int) -> Cluster:
    """Return a cluster of the simulator, with a worker in reserve that is as fast as the first."""
    cluster = scenario(name, WORKERS, STEPS, seed).cluster
    times = ctrl.timing.BatchTime(*(np.append(part, part[0]) if np.ndim(part) else part for part in cluster.times))
    slow = cluster.slowdown
    trace = None if slow is None else lambda step, clock: np.append(slow(step, clock), 1.0)
    return replace(cluster, times=times, slowdown=trace)


CLUSTERS: dict[str, Callable[[int], Cluster]] = {
    "1.3 times as slow for good": lambda seed: _equal(1.3),
    "2 times": lambda seed: _equal(2.0),
    "4 times": lambda seed: _equal(4.0),
    "4 times, and a fixed cost of half a step": lambda seed: _equal(4.0, 0.128),
    "2 times, and stragglers at random": lambda seed: replace(
        _equal(2.0), noise=noises([jitter(JITTER), stragglers(0.005, 5.0)])
    ),
    "step_change": lambda seed: _from("step_change", seed),
    "cascade": lambda seed: _from("cascade", seed),
}
QUIET = ("equal", "affine", "knees", "noisy", "random_stragglers", "drift", "growing")


def removed(make: Callable[[int], Cluster], seeds: int) -> dict[str, str]:
    """Return the share of the slowdown that each policy removes: median, minimum and maximum over seeds."""
    parts: dict[str, list[float]] = {"balance": [], "mitigate_slow_workers": []}
    slower = []
    for seed in range(seeds):
        cluster = replace(make(seed), first=WORKERS, join_after=2)
        first = ctrl.timing.BatchTime(*(part[:WORKERS] if np.ndim(part) else part for part in cluster.times))
        sizes = [*ctrl.timing.allocate(128 * WORKERS, first, 1, 128 * WORKERS).tolist()]

        def seconds(policy: ctrl.Policy, cluster: Cluster = cluster, sizes: list[int] = sizes, seed: int = seed):
            hook = Hooked(policy, () if policy.name == "equal" else ("seconds",))
            return simulate([hook], cluster, [*sizes, 0], STEPS, seed=seed).total_seconds

        alone, healthy = seconds(equal()), seconds(equal(), replace(cluster, slowdown=None))
        slower.append(alone / healthy)
        for name in parts:
            parts[name].append((alone - seconds(getattr(ctrl, name)())) / (alone - healthy))
    cells = {name: f"{np.median(p):.0%} ({min(p):.0%} to {max(p):.0%})" for name, p in parts.items()}
    return {"the split left alone": f"{np.median(slower):.2f} times as long"} | cells


def swaps_in_vain(name: str, seeds: int) -> int:
    """Count swaps where no worker becomes slow for good."""
    asked = 0
    for seed in range(seeds):
        case = scenario(name, WORKERS, STEPS, seed)
        cluster = replace(_from(name, seed), first=WORKERS)
        hooks = [*case.before, Hooked(ctrl.mitigate_slow_workers(), ("seconds",))]
        run = simulate(hooks, cluster, case.global_batch, STEPS, seed=seed)
        asked += sum(decision.workers is not None for _, decision in run.decisions)
    return asked


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    quiet = sum(len(onsets(seed, 10_000)) for seed in range(5))
    rows: list[dict[str, str]] = [{"cluster": name} | removed(make, args.seeds) for name, make in CLUSTERS.items()]
    found = detection(args.runs)
    vain = {name: swaps_in_vain(name, args.seeds) for name in QUIET}
    lines = [", ".join(f"{column}: {cell}" for column, cell in row.items()) for row in found]
    notes = [
        f"Detector, {WORKERS} workers, {JITTER:.0%} jitter: {quiet} false alarms in 5 runs of 10,000 quiet steps. "
        f"After a change, {args.runs} runs each:\n\n" + "\n".join(f"- {line}" for line in lines),
        f"Swaps on clusters where no worker becomes slow for good, {args.seeds} runs of {STEPS} steps each: "
        + ", ".join(f"{name} {count}" for name, count in vain.items())
        + ".",
        f"The part of the slowdown removed, {STEPS} steps, {args.seeds} seeds: median, and the least and the most. "
        "Above 100 %: the worker of the reserve, or the split, is better than the healthy one. Virtual time.",
    ]
    path = "slow_workers.md" if args.write else None
    report("The slowdown by a slow worker that policies remove", rows, path, notes)


if __name__ == "__main__":
    main()
