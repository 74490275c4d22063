"""What a sum over several hosts costs: one Allreduce, or three calls that send a host's sum once.

    python benchmarks/sum_between_hosts.py

Two hosts are network namespaces of this machine (Linux and root), joined at 1 Gbit/s, with two ranks each, and then
with four. Three ways alternate in each job, with mpi4py alone; a job has its ranks in consecutive order (0 and 1 on the
first host) or alternating (0 and 2 there), and the jobs alternate, too:

    plain          Allreduce over all ranks
    three calls    Reduce to a host's first rank, Allreduce between those, Bcast within the host
    ordered        Allreduce over all ranks in a communicator in which a host's ranks are consecutive

Reported is the time of the slowest rank, and the bytes that the busiest host sends, as the system counts them.
`--rank` runs the part of each rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from _hosts import job, joined, tell
from _measure import command_line, report, slowest, summary

PLACEMENTS = {"slot": "consecutive", "node": "alternating"}
RANKS = 2, 4  # on each host
SIZES = {"100 kB": 100_000, "4 MB": 4_000_000, "40 MB": 40_000_000}
PLAIN, THREE, ORDERED = "plain", "three calls", "ordered"
# As `adaptive run` starts a job.
OPTIONS, ENVIRON = ["--with-ft", "ulfm"], {"OMPI_MCA_coll": "^han"}


def rank(rounds: int) -> None:
    """Time the ways on this rank; rank 0 tells the slowest rank's seconds and the busiest host's bytes."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    found: dict[str, dict[str, list[float]]] = {}
    for size, nbytes in SIZES.items():
        sent = np.full(nbytes // 4, 1.0 + world.rank, np.float32)
        ways = ways_of(MPI, sent)
        for way in ways.values():
            assert np.all(way() == sum(range(1, world.size + 1)))
        carried = {name: sent_by_a_host(world, way) for name, way in ways.items()}
        found[size] = {name: [carried[name], *seconds.tolist()] for name, seconds in slowest(ways, rounds).items()}
    if world.rank == 0:
        tell(found)


def ways_of(mpi: Any, sent: np.ndarray) -> dict[str, Callable[[], np.ndarray]]:
    """Return the ways by name; each returns the sum of `sent` over all ranks."""
    world, received = mpi.COMM_WORLD, np.empty_like(sent)
    within = world.Split_type(mpi.COMM_TYPE_SHARED, world.rank)
    leads = within.rank == 0
    between = world.Split(0 if leads else mpi.UNDEFINED, world.rank)
    names = world.allgather(os.uname().nodename)
    ordered = world.Split(0, names.index(names[world.rank]) * world.size + world.rank)

    def plain(comm: Any) -> np.ndarray:
        comm.Allreduce(sent, received)
        return received

    def three() -> np.ndarray:
        within.Reduce(sent, received if leads else None)
        if leads:
            between.Allreduce(mpi.IN_PLACE, received)
        within.Bcast(received)
        return received

    return {PLAIN: partial(plain, world), THREE: three, ORDERED: partial(plain, ordered)}


def sent_by_a_host(world: Any, way: Callable[[], Any]) -> float:
    """Return the bytes that the busiest host sends in one sum, headers included."""

    def sent_so_far() -> int:
        world.Barrier()
        lines = Path("/proc/net/dev").read_text().splitlines()
        found = next(line for line in lines if line.strip().startswith("e0:"))
        return int(found.partition(":")[2].split()[8])

    before = sent_so_far()
    way()
    return float(max(world.allgather(sent_so_far() - before)))


def main() -> None:
    args = command_line(
        __doc__,
        rank=False,
        rounds=9,
        jobs=(2, "of each placement, in turn"),
        rate=("1gbit", "of the hosts' links, as tc reads it"),
    ).parse_args()
    if args.rank:
        rank(args.rounds)
        return
    times: dict[tuple[int, str, str], dict[str, list[float]]] = {}
    nbytes: dict[tuple[int, str, str, str], float] = {}
    load = os.getloadavg()[0]
    with joined(2, args.rate) as made:
        for _ in range(args.jobs):
            for on_a_host, placement in product(RANKS, PLACEMENTS):
                script = [__file__, "--rank", "--rounds", str(args.rounds)]
                done = job(script, 2 * on_a_host, made, options=OPTIONS, environ=ENVIRON, placement=placement)
                for size, ways in done.items():
                    for name, (carried, *seconds) in ways.items():
                        times.setdefault((on_a_host, size, placement), {}).setdefault(name, []).extend(seconds)
                        nbytes[on_a_host, size, placement, name] = carried
    rows = [
        {
            "ranks on a host": on_a_host,
            "message": size,
            "order": PLACEMENTS[placement],
            **row.cells(),
            "a host sends": f"{nbytes[on_a_host, size, placement, row.name] / 1e6:.2f} MB",
        }
        for on_a_host, size, placement in product(RANKS, SIZES, PLACEMENTS)
        for row in summary(times[on_a_host, size, placement], PLAIN)
    ]
    ratio = {
        placement: np.median(ways[THREE]) / np.median(ways[PLAIN])
        for placement in PLACEMENTS
        for ways in [times[2, "4 MB", placement]]
    }
    report(
        f"4 MB over two hosts of two ranks: three calls take {ratio['slot']:.2f} times the seconds of one Allreduce "
        f"with ranks in consecutive order, {ratio['node']:.2f} times with alternating ones",
        rows,
        args.write,
        [
            f"Two hosts (network namespaces), joined at {args.rate}; {args.jobs} jobs of each number and order of "
            f"ranks, in turn, with {args.rounds} rounds each, in which the ways alternate. Ratios are to plain. Both "
            "hosts are on this machine: its two cores carry all ranks and the TCP of both hosts. Load before: "
            f"{load:.1f}.",
        ],
    )


if __name__ == "__main__":
    main()
