"""When one of three ranks is killed, the next step comes at most 50 ms late; between two hosts 150 ms.

    python benchmarks/survival.py [--rounds 13] [--hosts] [--torch /tmp/torch/bin/python] [--more]

Jobs of eight ranks: three train a small net (steps of some 5 ms on a core of their own, with the noise scale and
balance), and five are in reserve. In each job six ranks are killed one after another by SIGKILL, at a random moment of
a random step: rank 0, 1 and 2 of the three equally often, in random order. After each loss a worker joins from the
reserve. The delay is the time from the kill to the end of the first step committed without the lost rank, on the slower
of the two remaining ranks, less the median of the 50 steps before the kill.

It has four parts. Dead: until the system has ended the process; before, nobody is notified. Noticed: until the second
of the two ranks has received an error from MPI. Repaired: until both have a communicator. Computed: until the end of
the step.

For comparison, alternating with these jobs: torchrun's restart after the death of a worker, if a Python with torch is
given (`_torchrun_restart.py`). `--hosts` runs on two hosts, which are network namespaces (Linux, root). `--more` adds
to the measurements in `results/survival.json`. `--rank` runs the part of each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import numpy as np
from _elastic import ROOT, Notes, job, monitored
from _measure import RESULTS, Spread, readable, report

WORKERS, SETTLED, RANDOM_SECONDS = 3, 60, 0.03
EVERY, RESTARTS = 3, 3  # torchrun's turn comes every so many rounds; and how many kills it then gets
FILE = RESULTS / "survival.json"
PARTS = ("dead", "noticed", "repaired", "computed")


def rank(folder: str, seed: int, kills: int) -> None:
    """Train on this rank, and kill this process when it is this rank's turn."""
    import collectives as comm
    from collectives.worlds.transport.mpi_transport import MPITransport

    notes = Notes(folder)
    notes.of_death()
    draw = random.Random(seed)
    victims = [victim for _ in range(0, kills, WORKERS) for victim in draw.sample(range(WORKERS), WORKERS)][:kills]
    notes.around(MPITransport, "_repair")
    quiet = 0  # steps since anybody came or went; the same on all
    with comm.world(workers=WORKERS) as world:
        program = monitored(world, workers=WORKERS)
        program.warm_up()
        for step in program.run():
            lost = [loss.seconds for loss in step.lost]
            notes.take("step", seconds=step.seconds, step=step.step, lost=lost, kernels=step.kernels, rank=world.rank)
            quiet = 0 if step.joined or step.lost else quiet + 1
            done = len(world.losses)
            if step.lost and world.most > len(step.members):
                program.rescale(workers=min(WORKERS, world.most))
            if done == kills and quiet == SETTLED:
                break
            if done < kills and quiet == SETTLED and world.rank == victims[done]:
                threading.Timer(random.uniform(0, RANDOM_SECONDS), die, [notes, world.rank]).start()


def die(notes: Notes, rank: int) -> None:
    notes.take("kill", rank=rank)
    os.kill(os.getpid(), signal.SIGKILL)


def kills_of(notes: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the measured parts of each kill of a job."""
    killed = [{line["kind"]: line for line in ranks} for ranks in notes]
    return [
        _kill(lines["kill"], lines["dead"]["t"], lines["start"]["host"], notes) for lines in killed if "kill" in lines
    ]


def _kill(kill: dict[str, Any], dead: float, host: str, notes: list[list[dict[str, Any]]]) -> dict[str, Any]:
    at, ends, noticed, repaired, before, compiled, hosts = kill["t"], [], [], [], [], 0, {host}
    for lines in notes:
        steps = [line for line in lines if line["kind"] == "step"]
        behind = [line for line in steps if line["t"] > at and line["lost"]]
        earlier = [line for line in steps if line["t"] < at][-50:]
        if not behind or not earlier or behind[0]["t"] > at + 60:
            continue  # it was in reserve
        first = behind[0]
        ends.append(first["t"])
        compiled += first["kernels"] - earlier[-1]["kernels"]
        before += [b["t"] - a["t"] for a, b in pairwise(earlier)]
        repairs = [line for line in lines if line["kind"] == "_repair" and at < line["t"] < first["t"]]
        noticed += [line["began"] for line in repairs]
        repaired += [line["t"] for line in repairs]
        hosts.add(lines[0]["host"])
    if len(ends) != WORKERS - 1 or not noticed:
        raise RuntimeError(f"a kill that {len(ends)} ranks have noticed: {kill}")
    return {
        "rank": kill["rank"],
        "median": float(np.median(before)),
        "dead": dead - at,
        "noticed": max(noticed) - dead,
        "repaired": max(repaired) - max(noticed),
        "computed": max(ends) - max(repaired),
        "kernels": compiled,
        "hosts": len(hosts),
    }


def restarts(python: str) -> list[dict[str, Any]]:
    """Return the seconds of torchrun's restart for each kill."""
    script = [str(ROOT / "benchmarks" / "_torchrun_restart.py"), "--json", "--kills", str(RESTARTS)]
    done = subprocess.run([python, *script], check=True, text=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1])


def measure(rounds: int, kills: int, on_hosts: bool, torch: str | None, known: dict[str, list]) -> None:
    """Add measurements, and write them after each job."""
    with ExitStack() as stack:
        hosts = None
        if on_hosts:
            sys.path.insert(0, str(ROOT))
            from tests.hosts import hosts as made

            hosts = stack.enter_context(made(2))
        where = "two hosts" if on_hosts else "one host"
        for number in range(rounds):
            seed = len(known[where])
            with job(WORKERS - 1 + kills, __file__, ["--seed", seed, "--kills", kills], hosts) as running:
                known[where] += kills_of(running.finished())
            if torch and number % EVERY == 0:
                known["torchrun"] += restarts(torch)
            FILE.write_text(json.dumps({**known, "load": [*known["load"], *os.getloadavg()[:1]]}))
            known["load"] = json.loads(FILE.read_text())["load"]


def rows(known: dict[str, list]) -> list[dict[str, object]]:
    """Return the rows of the table, by killed rank and for all."""
    found = []
    for where in ("one host", "two hosts"):
        for which in (0, 1, 2, None):
            kills = [kill for kill in known[where] if which in (None, kill["rank"])]
            if kills:
                name = "any" if which is None else f"rank {which}"
                found.append({"where": where, "killed": name, **cells(kills)})
    if known["torchrun"]:
        found.append({"where": "one host", "killed": "torchrun's restart", **cells(known["torchrun"])})
    return found


def cells(kills: list[dict[str, Any]]) -> dict[str, object]:
    parts = {name: [kill.get(name, np.nan) for kill in kills] for name in PARTS}
    median = np.array([kill["median"] for kill in kills])
    late = np.array([kill.get("whole") or sum(kill[name] for name in parts) for kill in kills]) - median
    spread = Spread.of(late)
    return {
        "kills": len(kills),
        "late: median": readable(spread.median),
        "p90": readable(spread.p90),
        "p99": readable(float(np.quantile(late, 0.99))),
        "worst": readable(float(late.max())),
        **{name: "" if np.isnan(part).any() else readable(float(np.median(part))) for name, part in parts.items()},
        "a step": readable(float(np.median(median))),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=13, help="jobs")
    parser.add_argument("--kills", type=int, default=6, help="in each job; the last leaves two ranks")
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--torch", metavar="PYTHON", help="one that has torch")
    parser.add_argument("--more", action="store_true")
    args = parser.parse_args()
    if args.rank:
        rank(args.rank, args.seed, args.kills)
        return
    known: dict[str, list] = {"one host": [], "two hosts": [], "torchrun": [], "load": []}
    if args.more and FILE.exists():
        known |= json.loads(FILE.read_text())
    measure(args.rounds, args.kills, args.hosts, args.torch, known)
    ours = [*known["one host"], *known["two hosts"]]
    compiled = sum(kill["kernels"] for kill in ours)
    notes = [
        f"Three workers, a launcher, up to five ranks in reserve and their watchdogs share {os.cpu_count()} cores. "
        "The other two take the step again, with the lost worker's examples. Medians of the parts need not "
        f"add up. Kernels compiled between the kill and the end of the step: {compiled}.",
        "Most of the time the system ends the process, and only then reports its death. Measured separately, beside "
        "busy processes: 20 to 40 ms for a sleeping process with JAX in it (212 MB, 15 threads), 1 to 4"
        " ms for a bare Python.",
        f"Load averages at the ends of jobs: {min(known['load']):.0f} to {max(known['load']):.0f}.",
    ]
    if not known["torchrun"]:
        notes.append("torchrun was left out: no Python with torch was given.")
    report("When one of three ranks is killed", rows(known), "survival.md", notes)


if __name__ == "__main__":
    main()
