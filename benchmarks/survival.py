"""When one of three ranks is killed, the next step comes at most 50 ms late; between two hosts 150 ms.

    python benchmarks/survival.py [--rounds 13] [--hosts] [--write]

Jobs of eight ranks: three train a small net (steps of some 5 ms on a core of their own, with the noise scale and
balance), and five are in reserve. In each job six ranks are killed one after another by SIGKILL, at a random moment of
a random step: rank 0, 1 and 2 of the three equally often, in random order. After each loss a worker joins from the
reserve. The delay is the time from the kill to the end of the first step committed without the lost rank, on the slower
of the two remaining ranks, less the median of the 50 steps before the kill.

It has four parts. Dead: until the system has ended the process; before, nobody is notified. Noticed: until the second
of the two ranks has received an error from MPI. Repaired: until both have a communicator. Computed: until the end of
the step.

`--hosts` runs on two hosts, which are network namespaces (Linux, root). `--rank` runs the part of each rank.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
from _elastic import Notes, job, monitored
from _hosts import joined
from _measure import Spread, command_line, readable, report

WORKERS, SETTLED, RANDOM_SECONDS = 3, 60, 0.03
PARTS = ("dead", "noticed", "repaired", "computed")


def rank(folder: str, seed: int, kills: int) -> None:
    """Train on this rank, and kill this process when it is this rank's turn."""
    import collectives as comm
    from collectives.worlds.transport.mpi_transport import MPITransport

    notes = Notes(folder)
    notes.of_death()

    def die() -> None:
        notes.take("kill", rank=world.rank)
        os.kill(os.getpid(), signal.SIGKILL)

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
                threading.Timer(random.uniform(0, RANDOM_SECONDS), die).start()


def kills_of(notes: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the measured parts of each kill of a job."""
    killed = [{line["kind"]: line for line in ranks} for ranks in notes]
    return [_kill(of["kill"], of["dead"]["t"], of["start"]["host"], notes) for of in killed if "kill" in of]


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


def measure(rounds: int, kills: int, on_hosts: bool) -> tuple[list[dict[str, Any]], list[float]]:
    """Return the measured parts of each kill, and the load averages at the ends of jobs."""
    found, load = [], []
    with joined(2) if on_hosts else nullcontext() as hosts:
        for seed in range(rounds):
            with job(WORKERS - 1 + kills, __file__, ["--seed", seed, "--kills", kills], hosts) as running:
                found += kills_of(running.finished())
            load.append(os.getloadavg()[0])
    return found, load


def row(name: str, kills: list[dict[str, Any]]) -> dict[str, object]:
    parts = {part: [kill[part] for kill in kills] for part in PARTS}
    median = np.array([kill["median"] for kill in kills])
    late = np.sum(list(parts.values()), axis=0) - median
    spread = Spread.of(late)
    return {
        "killed": name,
        "kills": len(kills),
        "late: median": readable(spread.median),
        "p90": readable(spread.p90),
        "p99": readable(float(np.quantile(late, 0.99))),
        "worst": readable(float(late.max())),
        **{part: readable(float(np.median(seconds))) for part, seconds in parts.items()},
        "a step": readable(float(np.median(median))),
    }


def main() -> None:
    args = command_line(
        __doc__,
        rank=None,
        seed=0,
        rounds=(13, "jobs"),
        kills=(6, "in each job; the last leaves two ranks"),
        hosts=False,
    ).parse_args()
    if args.rank:
        rank(args.rank, args.seed, args.kills)
        return
    kills, load = measure(args.rounds, args.kills, args.hosts)
    of_ranks = {f"rank {n}": [kill for kill in kills if kill["rank"] == n] for n in range(WORKERS)}
    rows = [row(name, those) for name, those in {**of_ranks, "any": kills}.items() if those]
    notes = [
        f"Three workers, a launcher, up to five ranks in reserve and their watchdogs share {os.cpu_count()} cores. "
        "The other two take the step again, with the lost worker's examples. Medians of the parts need not "
        f"add up. Kernels compiled between the kill and the end of the step: {sum(kill['kernels'] for kill in kills)}.",
        f"Load averages at the ends of jobs: {min(load):.0f} to {max(load):.0f}.",
    ]
    where, suffix = ("between two hosts", "_on_two_hosts") if args.hosts else ("on one host", "")
    path = f"survival{suffix}.md" if args.write else None
    report(f"When one of three ranks is killed, {where}", rows, path, notes)


if __name__ == "__main__":
    main()
