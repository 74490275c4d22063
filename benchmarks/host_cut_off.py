"""When a host of a job is cut off, the others take their next step within 5 s.

No host is declared lost because its cores are busy, or because the launcher is stopped for 8 s.

    python benchmarks/host_cut_off.py [--cuts 4] [--seconds 60]

Three ranks train a small net on two hosts, which are network namespaces of this machine (Linux, root), by
`adaptive run` with its default `--host-timeout`. After 100 steps, at a random moment, the link of the host with one
rank is taken down. Late is the time from then to the end of the first step without that rank, on the slower of the two
that are left.

False alarms are counted in the same job beside a busy process for each core, and while the launcher is stopped
(SIGSTOP) for 8 s, which is longer than the timeout. `--rank` runs the part of each rank.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
from _elastic import ROOT, Job, Notes, job, monitored
from _measure import readable, report

sys.path.insert(0, str(ROOT))

BEFORE, AFTER = 100, 20  # steps before a cut, and after it
STOPPED_SECONDS = 8.0
BUSY = 1  # processes per core


def rank(folder: str) -> None:
    """Train on this rank until the file `stop` is in the folder, or 20 steps after a loss."""
    import collectives as comm

    notes = Notes(folder)
    stop = Path(folder, "stop")
    with comm.world() as world:
        program = monitored(world, workers=3)
        program.warm_up()
        after = 0
        for step in program.run():
            notes.take("step", step=step.step, lost=len(step.lost), host=os.uname().nodename)
            after += bool(world.losses)
            if after == AFTER or any(world.all_gather_bytes(b"x" * stop.exists())):
                break


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Run this many processes that loop."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def wait_for_steps(running: Job, steps: int) -> None:
    """Wait until all ranks have taken this many steps."""
    while min((len(lines) for lines in running.notes()), default=0) < steps or len(running.notes()) < 3:
        if running.process.poll() is not None:
            raise RuntimeError(f"the job ended with {running.process.returncode}")
        time.sleep(0.1)


def cut_once(hosts: object, beside: int) -> float:
    """Cut a host off, and return how late the next step of the others comes, in seconds."""
    with hosts(2) as made, busy(beside), job(3, __file__, [], made) as running:
        wait_for_steps(running, BEFORE)
        time.sleep(random.uniform(0, 3))
        at = time.monotonic()
        made.cut("h2")
        notes = running.finished()
    firsts = [next((line["t"] for line in lines if line.get("lost")), None) for lines in notes]
    found = [first - at for first in firsts if first is not None]
    if len(found) != 2:
        raise RuntimeError(f"{len(found)} ranks went on")
    return max(found)


def alarms(hosts: object, seconds: float, beside: int, stopped: bool) -> tuple[int, int]:
    """Return (steps taken, ranks lost) of a job whose hosts stay connected."""
    with hosts(2) as made, busy(beside), job(3, __file__, [], made) as running:
        wait_for_steps(running, BEFORE)
        if stopped:
            launcher = _launcher(running)
            launcher.suspend()
            time.sleep(STOPPED_SECONDS)
            for process in (launcher, *launcher.parents()):  # the command that enters the host has stopped with it
                if process.status() == psutil.STATUS_STOPPED:
                    process.resume()
        time.sleep(seconds)
        (running.folder / "stop").touch()
        notes = running.finished()
    steps = [line for lines in notes for line in lines if line["kind"] == "step"]
    return max(line["step"] for line in steps), sum(bool(line["lost"]) for line in steps)


def _launcher(running: Job) -> psutil.Process:
    """Return the process of `adaptive run`, which is a descendant of the commands that enter the host."""
    started = psutil.Process(running.process.pid)
    found = [started, *started.children(recursive=True)]
    return next(p for p in found if "launchers.run" in p.cmdline() and "nsenter" not in p.name())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", metavar="FOLDER")
    parser.add_argument("--cuts", type=int, default=4, help="of each kind")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--no-results", action="store_true", help="print only")
    args = parser.parse_args()
    if args.rank:
        rank(args.rank)
        return
    from tests.hosts import hosts

    rows: list[dict[str, object]] = []
    for name, beside in (("idle", 0), ("a busy process per core", BUSY * (os.cpu_count() or 1))):
        late = [cut_once(hosts, beside) for _ in range(args.cuts)]
        rows.append({
            "beside": name, "cuts": len(late), "late: median": readable(float(np.median(late))),
            "least": readable(min(late)), "worst": readable(max(late)),
        })  # fmt: skip
        print(rows[-1], flush=True)
    calm = [alarms(hosts, args.seconds, BUSY * (os.cpu_count() or 1), False), alarms(hosts, 5.0, 0, True)]
    notes = [
        f"False alarms: {calm[0][1]} in {args.seconds:g} s and {calm[0][0]} steps beside a busy process per "
        f"core; {calm[1][1]} while the launcher was stopped for {STOPPED_SECONDS:g} s. The kernels of both sides probe "
        "the connections and answer the probes, so neither a process that waits for a core nor a launcher that is busy "
        "looks like a host that is cut off.",
        f"Load average at the end: {os.getloadavg()[0]:.1f}, with tests of other kinds beside it.",
    ]
    report("When a host is cut off", rows, None if args.no_results else "host_cut_off.md", notes)


if __name__ == "__main__":
    main()
