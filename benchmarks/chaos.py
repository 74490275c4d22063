"""After any faults of its processes, a job ends as specified, and its result equals a plain loop's.

    python benchmarks/chaos.py --events 1000
    python benchmarks/chaos.py --events 100 --strategies

Runs jobs of 2 to 4 processes one after another until this number of events has happened. Processes are killed, stopped,
slowed down, or receive SIGTERM, at any moment: during an exchange, a rendezvous, a repair, or in reserve. Workers join
from the reserve and return to it; batches and shares change. The seed of a job determines its events
(`tests/mpi/chaos.py`). The checks are in `tests/mpi/chaotic.py`.

With `--strategies`, jobs also train by rounds (4-bit diloco, islands and quorum, in turn), beside the model
that is compared with the plain loop. In the end all processes must have the same model and outer optimizer state of the
strategy, and the model must have learned.

The targets: no hang; no wrong exit code; the final state within 1e-10 of a plain loop over the same stream and the same
global batches; every example used exactly as often as in that loop.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from _measure import command_line, report

from tests.mpi.chaos import STEPS, STRATEGIES
from tests.mpi.chaotic import LIMIT, Verdict, run

ENDS = {"well": "well", "raise": "by an error", "too few": "because all were killed"}


def digest(verdict: Verdict) -> dict[str, object]:
    """Return the part of a job's result that is kept."""
    return {
        "seed": verdict.plan.seed,
        "strategy": verdict.plan.strategy,
        "ends": verdict.plan.ends,
        "code": verdict.code,
        "seconds": round(verdict.seconds, 1),
        "wrong": verdict.wrong,
        "difference": verdict.difference,
        "events": [[event["kind"], event["at"], bool(event.get("reserve"))] for event in verdict.events],
        "repairs": verdict.repairs,
        "joined": sum(line["what"] == "joined" for line in verdict.log),
    }


def tables(jobs: Sequence[dict]) -> tuple[list[dict], list[str]]:
    """Return events by kind and phase, and the other findings as sentences."""
    events = [tuple(event) for job in jobs for event in job["events"]]
    kinds = Counter(kind for kind, _, _ in events)
    columns = [
        kind for kind in ("kill", "SIGTERM", "stop", "slow", "raise", "workers", "batch", "shares") if kinds[kind]
    ]
    rows: list[dict] = []
    for phase in sorted({phase for _, phase, _ in events}):
        counts = Counter(kind for kind, at, _ in events if at == phase)
        rows.append({"phase": phase, **{kind: counts[kind] or "" for kind in columns}})
    rows.append({"phase": "in all", **{kind: kinds[kind] for kind in columns}})
    repairs = 1e3 * np.asarray([seconds for job in jobs for seconds in job["repairs"]] or [np.nan])
    wrong = [f"seed {job['seed']}: {'; '.join(job['wrong'])}" for job in jobs if job["wrong"]]
    hangs = sum(any(text in ("hang", "slow end") for text in job["wrong"]) for job in jobs)
    exits = sum(any(text.startswith("exit code") for text in job["wrong"]) for job in jobs)
    ends = Counter(job["ends"] for job in jobs)
    text = [
        f"{len(events)} events in {len(jobs)} jobs of {STEPS} steps, seeds {_ranges(jobs)}: "
        f"{', '.join(f'{n} that end {ENDS[end]}' for end, n in ends.items())}; "
        f"{sum(reserve for _, _, reserve in events)} of the events to processes in reserve.",
        f"Hangs: {hangs}. Wrong exit codes: {exits}. Other errors: {len(wrong) - hangs - exits}. "
        f"Largest difference from the plain loop: {max(job['difference'] for job in jobs):.1e}.",
        f"Repairs: {np.isfinite(repairs).sum()}; median {np.median(repairs):.1f} ms, 95th percentile "
        f"{np.quantile(repairs, 0.95):.1f} ms, from when a survivor noticed to when all could go on. A job took "
        f"{np.median([job['seconds'] for job in jobs]):.0f} s (median).",
    ]
    beside = Counter(job.get("strategy", "") for job in jobs)
    if set(beside) != {""}:
        text.append(f"Jobs by what they also train: {', '.join(f'{n} {name}' for name, n in sorted(beside.items()))}.")
    if wrong:
        text.append("What went wrong:\n\n" + "\n".join(f"* {line}" for line in wrong))
    return rows, text


def _ranges(jobs: Sequence[dict]) -> str:
    seeds = [job["seed"] for job in jobs]
    first = [seed for seed in seeds if seed - 1 not in seeds]
    last = [seed for seed in seeds if seed + 1 not in seeds]
    return " and ".join(f"{a} to {b}" for a, b in zip(first, last, strict=True))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--first", type=int, default=1000, help="the seed of the first job")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for a job")
    parser.add_argument("--jobs", type=Path, help="a file to add what came of each job to, and to go on from")
    parser.add_argument("--strategies", action="store_true", help="also train by rounds, of each kind in turn")
    args = parser.parse_args()
    jobs: list[dict] = []
    if args.jobs and args.jobs.exists():
        jobs = [json.loads(line) for line in args.jobs.read_text().splitlines()]
    seed = jobs[-1]["seed"] + 1 if jobs else args.first
    while sum(len(job["events"]) for job in jobs) < args.events:
        strategy = STRATEGIES[seed % len(STRATEGIES)] if args.strategies else ""
        verdict = run(seed, strategy, limit=args.limit)
        print(verdict, flush=True)
        if verdict.wrong:
            print(verdict.output, flush=True)
        jobs.append(digest(verdict))
        if args.jobs:
            with args.jobs.open("a") as file:
                file.write(json.dumps(jobs[-1]) + "\n")
        seed += 1
    rows, notes = tables(jobs)
    name = "chaos_of_strategies.md" if args.strategies else "chaos.md"
    report("After any faults of its processes, a job ends as specified", rows, name if args.write else None, notes)


if __name__ == "__main__":
    main()
