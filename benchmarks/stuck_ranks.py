"""By default, a stopped rank is reported after max(2 s, 10 times the 99th percentile of a step).

It is killed after twice that. In 100,000 noisy steps no rank is past that limit.

    python benchmarks/stuck_ranks.py [--stops 6]

One job: three workers train a small net, others are in reserve. Again and again a worker stops itself (SIGSTOP), the
launcher has it killed, and one of the reserve takes its place. Noted is the time until the next step.

Noise: 100,000 steps are drawn from distributions with tails, with a pause now and then. The limit is that of
`launchers/hangs.py`, from the steps before each. A step counts as past the limit if it is longer, as if all other ranks
had waited for it from its beginning. Pauses for compiling, evaluation, checkpoints and input are phases of their own,
with a limit of a minute. `--rank` runs the part of each rank.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
from _elastic import Notes, job, monitored
from _measure import command_line, readable, report

WORKERS, QUIET = 3, 100  # steps without a change before the next stop
STEPS, EVERY = 100_000, 10  # noisy steps; the limit is computed anew every so many
PAUSE_EVERY, PAUSE = 1000, 30.0
NOISES = {
    "lognormal, sigma 0.2": lambda draw: 0.5 * draw.lognormal(0, 0.2, STEPS),
    "lognormal, sigma 0.5": lambda draw: 0.5 * draw.lognormal(0, 0.5, STEPS),
    "lognormal, sigma 0.8": lambda draw: 0.5 * draw.lognormal(0, 0.8, STEPS),
    "1 % of the steps 20 times as long": lambda draw: 0.5 * np.where(draw.random(STEPS) < 0.01, 20, 1.0),
    "0.1 % of the steps 9 times as long, and 10 % jitter": lambda draw: (
        0.5 * draw.lognormal(0, 0.1, STEPS) * np.where(draw.random(STEPS) < 0.001, 9, 1.0)
    ),
    "exponential": lambda draw: draw.exponential(0.5, STEPS),
    "Pareto, exponent 3": lambda draw: 0.5 * (1 + draw.pareto(3, STEPS)),
    "steps of 5 ms, 1 in 1,000 takes 1 s": lambda draw: np.where(draw.random(STEPS) < 0.001, 1.0, 5e-3),
}


def rank(folder: str, stops: int) -> None:
    """On each rank: train, and stop when it is this rank's turn."""
    import collectives as comm

    notes = Notes(folder)
    with comm.world(workers=WORKERS) as world:
        program = monitored(world, workers=WORKERS)
        program.warm_up()
        quiet = 0
        for step in program.run():
            notes.take("step", step=step.step, lost=len(step.lost))
            quiet = 0 if step.joined or step.lost else quiet + 1
            done = len(world.losses)
            if step.lost and world.most > len(step.members):
                program.rescale(workers=min(WORKERS, world.most))
            if done == stops and quiet == QUIET:
                break
            if done < stops and quiet == QUIET and world.rank == done % WORKERS:
                notes.take("stops")
                os.kill(os.getpid(), signal.SIGSTOP)


def stops_of(notes: list[list[dict[str, Any]]]) -> list[float]:
    """Return for each stop the seconds until the next step."""
    lines = sorted((line for of_rank in notes for line in of_rank), key=lambda line: line["t"])
    found = []
    for at in (line["t"] for line in lines if line["kind"] == "stops"):
        steps = [next(n["t"] for n in of if n["t"] > at and n.get("lost")) for of in notes if _took_part(of, at)]
        found.append(max(steps) - at)
    return found


def _took_part(lines: list[dict[str, Any]], at: float) -> bool:
    """Return whether a rank took the step after a stop, in which the loss was reported."""
    return any(line["t"] > at and line.get("lost") for line in lines) and any(
        line["kind"] == "step" and line["t"] < at for line in lines
    )


def past_the_limit(seconds: np.ndarray) -> tuple[int, int, float]:
    """Return how many steps are longer than the limit, how many longer than twice, and the median limit."""
    from launchers.activity import RECENT, percentile
    from launchers.hangs import default_limit

    paused = seconds.copy()
    paused[PAUSE_EVERY - 1 :: PAUSE_EVERY] += PAUSE
    ends = np.concatenate([[0.0], np.cumsum(paused)])
    late = due = 0
    limits = []
    for k in range(0, len(seconds), EVERY):
        recent = ends[max(0, k + 1 - RECENT) : k + 1]
        limit = default_limit(percentile(list(recent)))
        limits.append(limit)
        late += int((seconds[k : k + EVERY] > limit).sum())
        due += int((seconds[k : k + EVERY] > 2 * limit).sum())
    return late, due, float(np.median(limits))


def main() -> None:
    args = command_line(__doc__, rank=None, stops=6).parse_args()
    if args.rank:
        rank(args.rank, args.stops)
        return
    rows: list[dict[str, object]] = []
    for name, noise in NOISES.items():
        late, due, limit = past_the_limit(noise(np.random.default_rng(0)))
        rows.append({
            "noise": name, "steps": STEPS, "past the limit": late, "past twice the limit": due,
            "limit (median)": readable(limit),
        })  # fmt: skip
    with job(WORKERS - 1 + args.stops, __file__, ["--stops", args.stops]) as running:
        stops = stops_of(running.finished())
    notes = [
        f"A rank that is stopped, among three with steps of some 5 ms, {len(stops)} stops: the next step comes after "
        f"{readable(float(np.median(stops)))} in the median, and {readable(max(stops))} at most.",
        f"Each run has a pause of {PAUSE:g} s every {PAUSE_EVERY} steps. Load average at the end: "
        f"{os.getloadavg()[0]:.1f}.",
    ]
    report("Stuck ranks, by default", rows, args.write, notes)


if __name__ == "__main__":
    main()
