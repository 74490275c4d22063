"""A rank in reserve takes at most 1 % of a core while others train.

    python benchmarks/idle_reserve.py [--seconds 30]

Of three ranks two train a small net, with the noise scale and balancing, and one waits in reserve with compiled
kernels. Measured is the processor time, user and system, of all threads of the process over 30 s. `--rank` runs the
part of each rank.
"""

from __future__ import annotations

import argparse
import os
import time

import psutil
from _elastic import Job, Notes, job, monitored
from _measure import readable, report

RANKS, WORKERS = 3, 2
START_SECONDS = 600.0


def rank(folder: str) -> None:
    """Train, or wait, on this rank until the parent process has measured."""
    import collectives as comm

    notes = Notes(folder)
    with comm.world(workers=WORKERS) as world:
        notes.take("world", reserve=world.workers[0] not in world.members)
        program = monitored(world, workers=WORKERS)
        program.warm_up()
        notes.take("warm")
        for step in program.run():
            if step.step % 100 == 0:
                notes.take("step", step=step.step)


def steady(running: Job) -> dict[int, bool]:
    """Wait until the workers train; return by process id whether a process is in reserve."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        notes = running.notes()
        kinds = [[line["kind"] for line in lines] for lines in notes]
        if all("warm" in kind for kind in kinds) and sum("step" in kind for kind in kinds) == WORKERS:
            return {lines[0]["pid"]: line["reserve"] for lines in notes for line in lines if line["kind"] == "world"}
        time.sleep(0.5)
    raise RuntimeError(f"no steps after {START_SECONDS:g} s")


def used(pid: int) -> float:
    """Return the processor seconds of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def steps_done(running: Job) -> int:
    return max(line["step"] for lines in running.notes() for line in lines if line["kind"] == "step")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    if args.rank:
        rank(args.rank)
        return
    with job(RANKS, __file__) as running:
        ranks = steady(running)
        steps, began, before = steps_done(running), time.monotonic(), {pid: used(pid) for pid in ranks}
        time.sleep(args.seconds)
        seconds, spent = time.monotonic() - began, {pid: used(pid) - before[pid] for pid in ranks}
        steps = steps_done(running) - steps
    rows = [
        {
            "": "in reserve" if reserve else "a worker",
            "processor time": readable(spent[pid]),
            "of a core": f"{100 * spent[pid] / seconds:.2f} %",
        }
        for pid, reserve in sorted(ranks.items(), key=lambda item: item[1])
    ]
    notes = [
        f"Over {seconds:.0f} s, in which the workers made some {steps} steps; {os.cpu_count()} cores, load average "
        f"{os.getloadavg()[0]:.0f}. A rank in reserve checks for control messages a hundred times a second, and its "
        "watchdog checks once a second."
    ]
    report("Processor use of a rank in reserve", rows, "idle_reserve.md", notes)


if __name__ == "__main__":
    main()
