"""A message of a step takes only a few microseconds more than the same calls of MPI by hand.

    PJRT_NPROC=1 mpirun -n 2 python -m mpi4py benchmarks/message_by_hand.py [--write]

Two ranks of one host exchange what a step sends: a packed part with the status, and large leaves. *By hand* is one
Allreduce of the 1 kB that announces a message, one Allreduce per part into existing buffers, and numpy's minimum and
maximum of each part. *Short way* is `Channel.exchange`, which does the same and what a world needs besides: a lock, the
comparison of announcements, the checks for values that are not finite, the data for a repair after a loss, and the
watchdog. *General way* is the same channel without its short way. All alternate in one run; reported is the time of one
rank for five consecutive messages, divided by five. `sys.setprofile` counts Python calls.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import jax
import numpy as np
from _measure import Spread, pin, readable, report
from mpi4py import MPI

import collectives as comm
from adaptive.base.channel import PartSpec, SentMessage

AT_A_TIME, STATUS = 5, 15
MESSAGES = {
    "100 numbers": [(100,)],
    "1,000 numbers": [(1000,)],
    "MLP of 134 k parameters": [(33_000,), (256, 400)],
    "16 leaves of 1 MiB": [(1000,), *[(512, 512)] * 16],
}


def largest(piece: np.ndarray) -> float:
    """Return the largest magnitude of a piece, as the check for values that are not finite computes it."""
    return max(float(np.maximum.reduce(piece)), -float(np.minimum.reduce(piece)))


def by_hand(parts: list[jax.Array], status: np.ndarray) -> Callable[[], Any]:
    """Call MPI directly."""
    ranks, frame = MPI.COMM_WORLD.Dup(), np.zeros(128)
    received = [np.zeros(part.shape, part.dtype) for part in parts]
    small = parts[0].size <= 124

    def exchange() -> list[np.ndarray]:
        if small:
            frame[4 : 4 + parts[0].size] = parts[0]
        frame[-len(status) :] = status
        ranks.Allreduce(MPI.IN_PLACE, frame)
        for part, into in zip(parts[small:], received[small:], strict=True):
            ranks.Allreduce(np.asarray(part), into)
            largest(into.reshape(-1))
        return received

    return exchange


def on_channel(world: comm.MPIWorld, parts: list[jax.Array], status: np.ndarray, *, short: bool) -> Callable[[], Any]:
    """Use a channel of the world."""
    channel = world.channel([PartSpec(x.shape, x.dtype, "sum") for x in parts], len(status), ("messages", short))
    if not short:
        channel._fast = False

    def exchange() -> None:
        (received, *_), _ = channel.exchange(SentMessage([parts], status, "message 1 of step 1", "", 1))
        for part in received:
            largest(np.asarray(part).reshape(-1))

    return exchange


def python_calls(work: Callable[[], Any]) -> int:
    """Return the number of Python functions that `work` calls, without itself."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count - 1


def measure(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, np.ndarray]:
    """Return the seconds of one message, round by round; the ways alternate."""
    seconds = {name: np.empty(rounds) for name in ways}
    names = list(ways)
    for r in range(-3, rounds):
        for i in range(len(names)):
            name = names[(r + i) % len(names)]
            MPI.COMM_WORLD.Barrier()
            began = perf_counter()
            for _ in range(AT_A_TIME):
                ways[name]()
            if r >= 0:
                seconds[name][r] = (perf_counter() - began) / AT_A_TIME
    return seconds


def main() -> None:
    """Compare the ways for each kind of message."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=100)
    arguments.add_argument("--write", action="store_true", help="write the result's file")
    options = arguments.parse_args()
    rows = []
    with comm.MPIWorld() as world:
        pin(world.rank % 2)
        for name, shapes in MESSAGES.items():
            parts = [jax.device_put(np.ones(shape, np.float32)) for shape in shapes]
            status = np.ones(STATUS, np.float32)
            ways = {
                "by hand": by_hand(parts, status),
                "short way": on_channel(world, parts, status, short=True),
                "general way": on_channel(world, parts, status, short=False),
            }
            seconds = measure(ways, options.rounds)
            for way, work in ways.items():
                more = Spread.of(seconds[way] - seconds["by hand"])
                rows.append(
                    {
                        "message": name,
                        "way": way,
                        "median": readable(Spread.of(seconds[way]).median),
                        "more than by hand, median (p10 – p90)": f"{1e6 * more.median:.1f} µs "
                        f"({1e6 * more.p10:.1f} – {1e6 * more.p90:.1f})",
                        "Python calls": python_calls(work),
                    }
                )
        if world.rank == 0:
            title = "A message of a step takes few microseconds more than the same calls of MPI by hand"
            report(title, rows, "message_by_hand.md" if options.write else None)


if __name__ == "__main__":
    main()
