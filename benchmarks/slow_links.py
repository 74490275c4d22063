"""A link that becomes slow is found within 15 steps and named, without false alarms, and a swap removes its cost.

    python benchmarks/slow_links.py [--runs 500] [--write]       # about 5 minutes of one core

First the detector, on simulated seconds of messages at 5 % jitter: false alarms in quiet steps, and steps until it
reports messages that take longer by a factor; then probes: the host that it names.

Then `mitigate_slow_workers` on six simulated clusters of four hosts with two workers each, whose links become slow, and
two hosts in reserve. The removed share of the slowdown is relative to a run in which nothing is done, over one without
slow links or workers. `throttled_link.py` measures the same on hosts of this machine.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
from _measure import report

import controllers as ctrl
from controllers.simulate import LINK_SCENARIOS, Cluster, Hooked, Simulation, link_scenario, simulate
from controllers.simulate._line_up import equal
from controllers.simulate._link_scenarios import HOSTS, JITTER, ON_HOST, RESERVE
from controllers.timing.slow_links import SlowLinks

AT, STEPS = 150, 600
FACTORS = 1.3, 2.0, 3.0
READS = "seconds", "exchange_seconds"


# --- the detector -----------------------------------------------------------------------------------------------------


def onsets(seed: int, steps: int, factor: float = 1.0) -> list[int]:
    """Return the steps at which slow phases are found; messages take `factor` times as long from `AT` on."""
    rng = np.random.default_rng([seed, round(100 * factor)])
    seconds = 0.1 * np.exp(JITTER * rng.standard_normal(steps))
    seconds[AT:] *= factor
    state, found = SlowLinks.init(1).sized(1), []
    for step, took in enumerate(seconds.tolist(), 1):
        before, state = state.since, state.observe(step, took)
        found += [step] if state.slow and state.since != before else []
    return found


def detection(runs: int) -> list[str]:
    """Return a line for each factor."""
    lines = []
    for factor in (1.15, 1.3, 2.0, 4.0):
        late, early = [], 0
        for seed in range(runs):
            found = onsets(seed, AT + 60, factor)
            early += sum(step <= AT for step in found)
            late.append(min((step - AT for step in found if step > AT), default=np.inf))
        middle, most = np.percentile(late, [50, 99], method="higher")
        within = f"found within 15 steps: {100 * np.mean(np.array(late) <= 15):.1f} %"
        slowest = f"{most:g}" if np.isfinite(most) else "not found"
        lines.append(f"{factor:g} times as long: {within}, steps: median {middle:g}, 99 % {slowest}; {early} early")
    return lines


# --- the policy -------------------------------------------------------------------------------------------------------


def run(cluster: Cluster, policy: ctrl.Policy, seed: int, every: int = 1, steps: int = STEPS) -> Simulation:
    """Return a simulated run."""
    hook = Hooked(policy, () if policy.name == "equal" else READS, every)
    return simulate([hook], cluster, [128] * HOSTS * ON_HOST + [0] * RESERVE * ON_HOST, steps, seed=seed)


def removed(name: str, factor: float, seeds: int) -> dict[str, str]:
    """Return the share of the slowdown that is removed: median, minimum and maximum over seeds."""
    parts: dict[str, list[float]] = {"every=1": [], "every=5": []}
    slower, who = [], []
    for seed in range(seeds):
        cluster = link_scenario(name, STEPS, factor)
        alone = run(cluster, equal(), seed).total_seconds
        healthy = run(replace(cluster, links=None, slowdown=None), equal(), seed).total_seconds
        slower.append(alone / healthy)
        for every in (1, 5):
            found = run(cluster, ctrl.mitigate_slow_workers(), seed, every)
            parts[f"every={every}"].append((alone - found.total_seconds) / (alone - healthy))
            left = [slot for _, decision in found.decisions for slot in decision.leave]
            who += [bool(left) and left[0] // ON_HOST in (1, 3)]
    cells = {name: f"{np.median(p):.0%} ({min(p):.0%} to {max(p):.0%})" for name, p in parts.items()}
    right = f"{sum(who)} of {len(who)}"
    return {"nothing done": f"{np.median(slower):.2f} times as long", "the right host leaves": right} | cells


def quiet(steps: int) -> str:
    """Return what the policy does in a long run without slow links."""
    cluster = replace(link_scenario("slow_host", 4 * steps, 1.0), overhead_noise=JITTER)
    said: list[str] = []
    policy = ctrl.mitigate_slow_workers()

    def update(observation, state):
        decision, state = policy.update(observation, state)
        if observation.due and decision is not None:
            said.extend(note for note in decision.notes if "messages" in note or "link" in note)
        return decision, state

    found = run(cluster, policy._replace(update=update), 0, every=5, steps=steps)
    left = sum(len(decision.leave) for _, decision in found.decisions)
    probes = sum(decision.probe for _, decision in found.decisions)
    return f"{steps:,} quiet steps of a cluster: {probes} probes, {len(said)} notes on links, {left} workers that leave"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rows = [
        {"links": f"{about}, {factor:g} times"} | removed(name, factor, args.seeds)
        for name, about in LINK_SCENARIOS.items()
        for factor in FACTORS
    ]
    alarms = sum(len(onsets(seed, 10_000)) for seed in range(5))
    notes = [
        f"Detector, {JITTER:.0%} jitter: {alarms} false alarms in 5 runs of 10,000 quiet steps. After a change at step "
        f"{AT}, {args.runs} runs each:\n\n" + "\n".join(f"- {line}" for line in detection(args.runs)),
        quiet(10_000) + ".",
        f"{STEPS} steps, {args.seeds} seeds: median, and the least and the most. Links become slow after a quarter of "
        "the run; messages are 39 % of a healthy step. A link that degrades to 1.3 times is not found: each of its "
        "steps is within the jitter, and gradual changes count from 1.43 times on. Virtual time, in which a probe "
        "takes 0.1 s.",
    ]
    path = "slow_links.md" if args.write else None
    report("The slowdown by slow links that a swap removes", rows, path, notes)


if __name__ == "__main__":
    main()
