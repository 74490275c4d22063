"""A link that is throttled in the middle of a run is named, and a swap with a worker on another host removes its cost.

    python benchmarks/throttled_link.py [--runs 2] [--write]       # about 12 minutes

Four ranks on four hosts (network namespaces of this machine: Linux, root and tc), of which three train and one is in
reserve. Each host's link carries 300 Mbit/s by a token bucket. After 120 steps that of the second host is throttled.
Kernels sleep for 20 ms, so that the ranks do not compete for the cores; a message has 1 MB.

The removed share is over the 250 steps after that, relative to runs of the same length with `balance`, and to the
steps before. `--rank` runs the part of each rank.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from typing import Any

import numpy as np
from _elastic import ROOT, Job, Notes, job
from _measure import readable, report

sys.path.insert(0, str(ROOT))

BEFORE, AFTER = 120, 250  # steps
RATE, SLOW_RATE, SLOW_HOST = "300mbit", ("150mbit", "75mbit", "40mbit"), "h2"
KERNEL_SECONDS, ELEMENTS = 0.02, 1 << 18
SWAP_SECONDS = 0.5
NAMES = r"the links? (of host|between hosts) "  # notes that name a host or two


def rank(folder: str, policy: str) -> None:
    """Train on this rank, and record its steps."""
    import jax
    import jax.numpy as jnp

    import adaptive as ad
    import collectives as comm
    import controllers as ctrl
    import monitors as mon

    def work(x: Any) -> Any:
        time.sleep(KERNEL_SECONDS)
        return x

    def driver(w: Any, batch: Any) -> Any:
        idle = jax.pure_callback(work, jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(0))
        grads = comm.all_reduce(w * batch["x"].mean() + idle)
        seconds, exchange = comm.all_gather((mon.compute_seconds(), mon.exchange_seconds()))
        if policy == "balance":
            ctrl.hook(ctrl.balance(), seconds, every=5)
        else:
            ctrl.hook(ctrl.mitigate_slow_workers(swap_seconds=SWAP_SECONDS), seconds, exchange, every=5)
        return w - 0.1 * grads, {}

    notes = Notes(folder)
    with comm.world(workers=3) as world:
        data = {"x": np.ones((384, 1), np.float32)}
        program = ad.Program(driver, jnp.ones(ELEMENTS), data, global_batch=12, world=world)
        for step in program.run(steps=BEFORE + AFTER + 20):
            notes.take("step", step=step.step, seconds=step.seconds, rank=world.rank, notes=step.notes)


def wait_for_step(running: Job, step: int) -> None:
    """Wait until rank 0 has taken this step."""
    while not any(line.get("step", 0) >= step for lines in running.notes() for line in lines):
        if running.process.poll() is not None:
            raise RuntimeError(f"the job ended with {running.process.returncode}")
        time.sleep(0.02)


def run_once(hosts: Any, policy: str, rate: str) -> dict[str, Any]:
    """Run a job, and throttle a link in it."""
    with hosts(4) as made:
        for i in range(1, 5):
            made.limit(f"h{i}", RATE)
        with job(4, __file__, [policy], made) as running:
            wait_for_step(running, BEFORE)
            made.limit(SLOW_HOST, rate)
            at = time.monotonic()
            lines = [line for lines in running.finished() for line in lines if line["kind"] == "step"]
    first = {line["step"]: line for line in sorted(lines, key=lambda line: -line["rank"])}
    steps = [first[step] for step in sorted(first)]
    throttled = next(line["step"] for line in steps if line["t"] > at)
    seconds = np.array([line["seconds"] for line in steps])
    after = seconds[throttled - 1 : throttled - 1 + AFTER]
    said = [(line["step"] - throttled, note) for line in steps for note in line["notes"]]
    for step, note in said:
        print(f"    {step:+d} {note}", flush=True)
    return {
        "before": float(np.median(seconds[BEFORE // 2 : throttled - 1])),
        "at last": float(np.median(after[-50:])),
        "after": float(after.sum()),
        "found": _first(said, r"messages take"),
        "named": _first(said, rf"{NAMES}.*\b{SLOW_HOST}\b"),
        "others": sum(bool(re.match(NAMES, note)) and SLOW_HOST not in note for _, note in said),
        "left": _first(said, r"left after step"),
    }


def _first(said: list[tuple[int, str]], pattern: str) -> float:
    return next((step for step, note in said if step >= 0 and re.search(pattern, note)), float("nan"))


def row(hosts: Any, rate: str, runs: int) -> dict[str, str]:
    """Run with and without the policy in turn, and return a row of the table."""
    alone, mitigated = [], []
    for _ in range(runs):
        alone.append(run_once(hosts, "balance", rate))
        mitigated.append(run_once(hosts, "mitigate_slow_workers", rate))
        print(rate, alone[-1], mitigated[-1], flush=True)
    removed = [
        (a["after"] - m["after"]) / (a["after"] - AFTER * (a["before"] + m["before"]) / 2)
        for a, m in zip(alone, mitigated, strict=True)
    ]

    def steps(name: str) -> str:
        return ", ".join("never" if np.isnan(run[name]) else f"{run[name]:g}" for run in mitigated)

    return {
        "throttled to": rate,
        "a step before": readable(float(np.median([run["before"] for run in alone + mitigated]))),
        "throttled, `balance`": readable(float(np.median([run["at last"] for run in alone]))),
        "after the swap": readable(float(np.median([run["at last"] for run in mitigated]))),
        "slow messages found after": steps("found"),
        f"{SLOW_HOST} named after": steps("named"),
        "left after": steps("left"),
        "other hosts named": steps("others"),
        "slowdown removed": ", ".join(f"{part:.0%}" for part in removed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", nargs=2, metavar=("FOLDER", "POLICY"))
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--rates", nargs="*", default=SLOW_RATE)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.rank:
        rank(*args.rank)
        return
    from tests.hosts import hosts

    load = os.getloadavg()[0]
    rows = [row(hosts, rate, args.runs) for rate in args.rates]
    notes = [
        f"{args.runs} runs each; numbers of steps since the link was throttled. Hooks run every 5 steps, and a swap "
        f"counts as {SWAP_SECONDS:g} s. Load average at the beginning: {load:.1f}; other work was on the machine.",
    ]
    report("A link that is throttled in the middle of a run", rows, "throttled_link.md" if args.write else None, notes)


if __name__ == "__main__":
    main()
