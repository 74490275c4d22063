"""Sums by hosts send ResNet-50's gradients once in each direction over a link, for any placement of ranks.

Aimed at: 0.6 times the time of a flat Allreduce.

    python benchmarks/exchange_between_hosts.py

Two hosts of two ranks each are network namespaces of this machine (Linux and root), joined at 1 Gbit/s (`--rate`). The
gradients are 214 tensors of 97.6 MiB in float32. Each job alternates between four ways: a program's exchange by hosts;
its flat exchange; the sums by hosts in bfloat16 (`wire=`); and an Allreduce per tensor with mpi4py. Settings of MPI
belong to a job, so each setting is a job of its own, and the jobs alternate, too:

    as our launcher starts it     ULFM, without Open MPI's collectives for hosts (han); TCP sends eagerly
    and TCP defaults              the same, and the receiver requests large messages, which is Open MPI's default
    Open MPI defaults             no ULFM, with han, and the receiver requests large messages

each with ranks 0 and 1 on the first host ("slot"), and with ranks 0 and 2 there ("node"); and one job has one rank on
each host. Reported is the time of the slowest rank. The system counts the bytes that a host sends. Four ranks share two
cores with the TCP of both hosts.

`--rank` runs the part of each rank.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _hosts import job, joined, tell
from _measure import Spread, alternate, readable, report, summary

PLACEMENTS = {"node": "0 and 2, 1 and 3", "slot": "0 and 1, 2 and 3"}
ALONE = "alone"  # one rank on each host: there is one way
TCP = "OMPI_MCA_btl_tcp_flags"
ASKED = "send,put,inplace,need-ack,need-csum,hetero-rdma"  # as `ompi_info` says that Open MPI 5.0 has it
OURS, THEIRS = "as our launcher starts it", "Open MPI defaults"
SETTINGS: dict[str, tuple[list[str], dict[str, str]]] = {
    OURS: (["--with-ft", "ulfm"], {"OMPI_MCA_coll": "^han"}),
    "and TCP defaults": (["--with-ft", "ulfm"], {"OMPI_MCA_coll": "^han", TCP: ASKED}),
    THEIRS: ([], {TCP: ASKED}),
}
BY_HOSTS, FLAT, PLAIN = "a program's, by hosts", "a program's, flat", "Allreduce per tensor"
NARROW = "a program's, wire=bfloat16"


def rank(rounds: int) -> None:
    """Time the ways on this rank; rank 0 prints the slowest rank's seconds."""
    import jax
    import jax.numpy as jnp
    from exchange_resnet50 import our_way, raw_ways, resnet50, setting
    from mpi4py import MPI

    import collectives as comm

    grads = jax.block_until_ready([jnp.full(s, 1.0 + MPI.COMM_WORLD.rank) for s in resnet50()])
    with comm.MPIWorld() as world:
        world.deterministic = True  # by hosts, and nothing is measured

        def flat(exchange: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                with setting(world, "_ways", None):
                    return exchange()

            return run

        ways = {
            **({BY_HOSTS: our_way(world, grads)} if world.transport.algorithms is not None else {}),
            FLAT: flat(our_way(world, grads)),
            NARROW: our_way(world, grads, wire=jnp.bfloat16),
            PLAIN: raw_ways(grads)[PLAIN],
        }
        for way in ways.values():
            for result in way():
                assert np.array_equal(result, np.full(result.shape, sum(range(1, world.size + 1)), np.float32))

        def in_step(way: Callable[[], Any]) -> None:
            way()
            MPI.COMM_WORLD.Barrier()  # so the next starts on all ranks at once

        sent = {name: sent_by_a_host(way) for name, way in ways.items()}
        own = alternate({name: partial(in_step, way) for name, way in ways.items()}, rounds, warmup=0)
        seconds = {name: np.max(MPI.COMM_WORLD.allgather(times), axis=0) for name, times in own.items()}
        if world.rank == 0:
            tell({name: [sent[name], *times] for name, times in seconds.items()})


def sent_by_a_host(way: Callable[[], Any]) -> float:
    """Return the bytes that the busiest host sends in one exchange, as the system counts them, headers included."""
    from mpi4py import MPI

    def sent_so_far() -> int:
        MPI.COMM_WORLD.Barrier()
        lines = Path("/proc/net/dev").read_text().splitlines()
        found = next(line for line in lines if line.strip().startswith("e0:"))
        return int(found.partition(":")[2].split()[8])

    before = sent_so_far()
    way()
    return max(MPI.COMM_WORLD.allgather(sent_so_far() - before))


def ratio(times: Sequence[float], reference: Sequence[float]) -> str:
    """Return the ratio of medians."""
    return f"{np.median(times) / np.median(reference):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", action="store_true")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--jobs", type=int, default=2, help="of each setting")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), help="by default all")
    parser.add_argument("--rate", default="1gbit", help="of the hosts' links, as tc reads it")
    args = parser.parse_args()
    if OURS not in args.settings:
        parser.error(f"--settings: {OURS!r} is what the others stand beside")
    if args.rank:
        rank(args.rounds)
        return
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    sent: dict[tuple[str, str, str], float] = {}
    cases = [(placement, setting) for placement in PLACEMENTS for setting in args.settings] + [(ALONE, OURS)]
    load = [os.getloadavg()[0]]
    with joined(2, args.rate) as made:
        for turn in range(args.jobs):
            for i in range(len(cases)):
                case = cases[(turn + i) % len(cases)]
                placement, setting = case
                options, environ = SETTINGS[setting]
                n, placed = (2, "slot") if placement == ALONE else (4, placement)
                ranks = [__file__, "--rank", "--rounds", str(args.rounds)]
                done = job(ranks, n, made, options=options, environ=environ, placement=placed)
                for way, (nbytes, *times) in done.items():
                    found.setdefault(case, {}).setdefault(way, []).extend(times)
                    sent[*case, way] = nbytes
                load.append(os.getloadavg()[0])
                medians = {way: readable(float(np.median(times))) for way, times in found[case].items()}
                carried = {way: round(sent[*case, way] / 1e6) for way in medians}
                print(*case, medians, carried, "MB;", f"load {load[-1]:.0f}", file=sys.stderr, flush=True)
    rows = []
    for (placement, setting), ways in found.items():
        plain = found.get((placement, THEIRS), {}).get(PLAIN)
        for row in summary(ways, PLAIN):
            spread = Spread.of(ways[row.name])
            rows.append(
                {
                    "": row.name,
                    "placed": PLACEMENTS.get(placement, "0, 1"),
                    "started": setting,
                    "a host sends": f"{sent[placement, setting, row.name] / 1e6:.0f} MB",
                    "median": readable(spread.median),
                    "p10 – p90": f"{readable(spread.p10)} – {readable(spread.p90)}",
                    "to plain": f"{row.ratio_of_medians:.2f}",
                    "to plain, Open MPI defaults": ratio(ways[row.name], plain) if plain else "–",
                }
            )
    told = {place: found[place, OURS] for place in PLACEMENTS}
    best = {place: ratio(ways[BY_HOSTS], ways[PLAIN]) for place, ways in told.items()}
    megabytes = {(place, way): round(sent[place, OURS, way] / 1e6) for place, _, way in sent}
    narrow = {place: ratio(ways[NARROW], ways[BY_HOSTS]) for place, ways in told.items()}
    narrow[ALONE] = ratio(found[ALONE, OURS][NARROW], found[ALONE, OURS][FLAT])
    report(
        f"By hosts, a host sends {megabytes['node', BY_HOSTS]} MB of ResNet-50's gradients in {best['node']} "
        f"(ranks alternate between hosts) and {best['slot']} times the seconds (consecutive ranks share a host) "
        f"of a flat "
        f"Allreduce, which sends {megabytes['node', PLAIN]} and {megabytes['slot', PLAIN]} MB",
        rows,
        f"exchange_between_hosts_{args.rate}.md",
        [
            f"214 tensors, 97.6 MiB; two ranks on each of two hosts (network namespaces), joined at {args.rate}; "
            f"{args.jobs} job(s) of each setting, in turn, with {args.rounds} rounds each, in which the ways "
            f"alternate. "
            "The minimum is 102.3 MB in each direction, 0.82 s at 1 Gbit/s. Ratios are of medians: to an Allreduce per "
            "tensor in the same jobs, and to the same in jobs with Open MPI defaults.",
            f"In bfloat16 a host of one rank sends {megabytes[ALONE, NARROW]} MB instead of "
            f"{megabytes[ALONE, FLAT]}, in {narrow[ALONE]} times the seconds of float32. A host of two ranks, which "
            f"sums first, sends {megabytes['node', NARROW]} MB if ranks alternate and "
            f"{megabytes['slot', NARROW]} MB if "
            f"consecutive ranks share it, in {narrow['node']} and {narrow['slot']} times the seconds of float32 "
            "by hosts.",
            "Both hosts are on this machine: its two cores carry four ranks and the TCP of both hosts. Load before and "
            f"between jobs: {min(load):.0f} to {max(load):.0f}. Above four, other work ran at the same time, and "
            "seconds, especially those of different jobs, say little about the network.",
        ],
    )


if __name__ == "__main__":
    main()
