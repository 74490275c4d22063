"""Jobs on hosts with a thin link between them: bytes on the interface and seconds of steps, of several programs.

`python -m mpi4py _thin_ranks.py PART TASK TIMES` is what each rank runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _hosts import tell
from _thin_tasks import FLOAT32, FORMATS, OUTER, TASKS, Task

import adaptive as ad
import collectives as comm
import collectives.strategies as sync
from collectives.strategies._diloco import inner_steps

HEADERS = 14 + 20 + 32  # bytes of a packet's headers: Ethernet, IP, and TCP with time stamps
ROUND, ISLAND_ROUND = 8, 32  # local steps of a round
ALONE = "local steps alone"
SYNCHRONOUS, ISLANDS, NARROW_ISLANDS = "synchronous", "islands", 'islands, wire="4bit"'
SYNCHRONOUS_8, SYNCHRONOUS_4 = 'synchronous, wire="8bit"', 'synchronous, wire="4bit"'


class Sent(NamedTuple):
    """What a host has sent, by its own counters."""

    nbytes: int  # headers included
    packets: int

    @classmethod
    def so_far(cls) -> Sent:
        """Read the counters of this host's interface."""
        lines = Path("/proc/net/dev").read_text().splitlines()
        numbers = next(line for line in lines if line.strip().startswith("e0:")).partition(":")[2].split()
        return cls(int(numbers[8]), int(numbers[9]))


def local_steps(task: Task, steps: int) -> sync.Strategy:
    """Return local steps as in a round, without an exchange of parameters."""

    def take(state: Any, value_and_grad: Any, batch: Any) -> Any:
        state, losses = inner_steps(task.inner, steps, *state, value_and_grad, batch)
        return state, losses.mean(0), None, None

    return sync.Strategy(
        "alone",
        lambda params: (params, task.inner.init(params)),
        take,
        per_worker_state=lambda state: state,
        model=lambda state: state[0],
    )


def programs_of(part: str, task: Task, world: Any) -> dict[str, tuple[ad.Program, int]]:
    """Return a part's programs, and how many steps of each are one measurement."""
    hosts, outer = comm.by_host(world), OUTER["0.7, momentum 0.5"]

    def program(strategy: sync.Strategy, steps: int, times: int = 1) -> tuple[ad.Program, int]:
        return task.program(world, strategy, steps), times

    if part == "rounds":
        found = {ALONE: program(local_steps(task, ROUND), ROUND)}
        for name, (wire, *_) in FORMATS.items():
            given = {"wire": wire} if wire is None else {"wire": wire, "hosts": hosts}
            found[name] = program(sync.diloco(task.inner, outer, ROUND, **given), ROUND)
            if name != FLOAT32:
                found[f"{name}, without hosts="] = program(sync.diloco(task.inner, outer, ROUND, wire=wire), ROUND)
        return found
    feedback = {"rounding": "error_feedback", "hosts": hosts}
    return {
        SYNCHRONOUS: program(sync.synchronous(task.inner), 1, 8),
        SYNCHRONOUS_8: program(sync.synchronous(task.inner, wire="8bit", **feedback), 1, 8),
        SYNCHRONOUS_4: program(sync.synchronous(task.inner, wire="4bit", **feedback), 1, 8),
        ISLANDS: program(sync.islands(task.inner, outer, ISLAND_ROUND, hosts), 1, ISLAND_ROUND),
        NARROW_ISLANDS: program(sync.islands(task.inner, outer, ISLAND_ROUND, hosts, wire="4bit"), 1, ISLAND_ROUND),
    }


def measured(world: Any, programs: Mapping[str, tuple[ad.Program, int]], times: int) -> dict[str, list[list[float]]]:
    """Take steps of the programs in turn, and return each one's measurements. The same on all ranks.

    A measurement is, per step: the bytes that the host which sends most puts on the link, the same without headers,
    and the seconds of the slowest rank.
    """
    for program, steps in programs.values():
        for _ in range(max(3, steps)):  # whole rounds
            program.step()
    found: dict[str, list[list[float]]] = {name: [] for name in programs}
    names = list(programs)
    for turn in range(times):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            program, steps = programs[name]
            world.barrier()
            before = Sent.so_far()
            seconds = sum(program.step().seconds for _ in range(steps))
            world.barrier()
            after = Sent.so_far()
            nbytes, packets = after.nbytes - before.nbytes, after.packets - before.packets
            own = json.dumps([nbytes, nbytes - HEADERS * packets, seconds])
            everyone = [json.loads(row) for row in world.all_gather_bytes(own.encode())]
            found[name].append((np.max(everyone, axis=0) / steps).tolist())
    return found


def rank(part: str, task: str, times: int) -> None:
    """Measure a part's programs; rank 0 tells the result."""
    with comm.world() as world:
        programs = programs_of(part, TASKS[task](), world)
        found = measured(world, programs, times)
        if world.rank == 0:
            tell(found)
        for program, _ in programs.values():
            program.close()


if __name__ == "__main__":
    rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))
