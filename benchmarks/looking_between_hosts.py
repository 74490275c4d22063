"""A request to the process of another host fetches a replica sooner than MPI's Rget, most of all on busy hosts.

    python benchmarks/looking_between_hosts.py

Two hosts of one rank and one core each are network namespaces of this machine (Linux and root). One rank publishes a
replica after each step, which multiplies matrices in XLA for some milliseconds. The other rank reads it repeatedly.
Three ways alternate, in blocks of a second:

    asked      a mailbox of the world: a thread of the owner answers requests
    Rget       the former way: a window over both ranks, polled by the reader; a thread of the owner calls MPI every
               millisecond, so that MPI makes progress while the owner computes
    nobody     no reads: the owner's own speed

in separate jobs: with idle cores; beside a busy process on each core, with Open MPI's defaults; and the same with
`mpi_yield_when_idle`, which is recommended where ranks outnumber cores. ULFM is off: with it Rget may never return.

`--rank` runs the part of each rank.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from _hosts import job, joined, tell
from _measure import Spread, contention, readable, report

ASKED, RGET, NOBODY = "asked", "Rget", "nobody"
SIZES = {"4 kB": 4 << 10, "1 MB": 1 << 20, "16 MB": 16 << 20}
BLOCK, PATIENCE = 1.0, 0.25  # seconds
SETTINGS = {"cores to themselves": (0, "0"), "busy": (1, "0"), "busy, yields": (1, "1")}


class ByRget:
    """The former way, from an earlier version of `collectives/worlds/mailboxes/mailbox.py`."""

    def __init__(self, nbytes: int):
        from mpi4py import MPI

        from collectives.worlds.mailboxes.seqlock import SlotLayout

        self._mpi, self._layout = MPI, SlotLayout([nbytes])
        self._window = MPI.Win.Allocate(self._layout.place, 1, MPI.INFO_NULL, MPI.COMM_WORLD)
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self._own = np.frombuffer(self._window.tomemory(), np.uint8)
        self._own[:] = 0
        self._room = np.zeros(self._layout.slot, np.uint8)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        MPI.COMM_WORLD.Barrier()

    def begin(self) -> None:
        """Start the thread that calls MPI."""
        self._over.clear()
        self._thread = threading.Thread(target=self._look_in)
        self._thread.start()

    def end(self) -> None:
        """Stop the thread that calls MPI."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _look_in(self) -> None:
        while not self._over.wait(0.001):
            self._mpi.COMM_SELF.Iprobe()

    def publish(self, vector: np.ndarray) -> None:
        self._layout.write(self._own, 0, [vector], self._window.Sync)

    def look(self) -> bool:
        """Return whether a complete copy was read."""
        return bool(self._layout.copy_latest(self._copy, 0, 0, self._room))

    def _copy(self, start: int, room: np.ndarray) -> None:
        request = self._window.Rget([room, self._mpi.BYTE], 1, (start, room.size, self._mpi.BYTE))
        while not request.Test():  # without a limit, so that what is late can be told
            time.sleep(0)


def rank(rounds: int) -> None:
    """Measure on this rank; rank 0 prints the results."""
    import jax
    import jax.numpy as jnp
    from mpi4py import MPI

    import collectives as comm

    os.sched_setaffinity(0, {MPI.COMM_WORLD.rank})
    step = jax.jit(lambda x: jnp.tanh(x @ x))
    x = jax.block_until_ready(step(jnp.full((400, 400), 1e-3)))
    looks: dict[str, list[float]] = {}  # seconds, of those that brought something
    blocks: dict[str, list[float]] = {}  # how many did, in a second
    without: dict[str, int] = {}  # how many did not
    steps: dict[str, list[float]] = {}
    with comm.MPIWorld() as world:
        for name, nbytes in SIZES.items():
            mailbox, window, vector = world.create_mailbox([nbytes], name), ByRget(nbytes), np.ones(nbytes, np.uint8)

            def look_asked(mailbox: Any = mailbox) -> bool:
                return mailbox.look(1, 0, 0) is not None

            ways = [(ASKED, partial(mailbox.publish, 1, 0, [vector]), look_asked)]
            ways += [(RGET, partial(window.publish, vector), window.look), (NOBODY, ways[0][1], None)]
            for turn in range(rounds):
                for i in range(len(ways)):
                    way, publish, look = ways[(turn + i) % len(ways)]
                    if way == RGET:
                        window.begin()
                    if world.rank:
                        publish()
                    MPI.COMM_WORLD.Barrier()
                    start, count, key = time.monotonic(), 0, f"{name}/{way}"
                    until = start + BLOCK
                    while time.monotonic() < until:
                        if world.rank:
                            jax.block_until_ready(step(x))
                            publish()
                            count += 1
                        elif look is None:
                            time.sleep(0.1)
                        else:
                            began = time.perf_counter()
                            found = look()
                            if found:
                                looks.setdefault(key, []).append(time.perf_counter() - began)
                            count += found
                            without[key] = without.get(key, 0) + (not found)
                            time.sleep(0.005)  # a local step
                    (steps if world.rank else blocks).setdefault(key, []).append(count / (time.monotonic() - start))
                    told = MPI.COMM_WORLD.gather(None)  # behind the last look
                    window.end()
                    assert told is None or len(told) == 2
        steps = MPI.COMM_WORLD.bcast(steps, 1)
        if world.rank == 0:
            tell({"looks": looks, "blocks": blocks, "without": without, "steps": steps})


def ranks_that_look(made: Any, busy: int, yields: str, rounds: int) -> dict[str, Any]:
    """Run a rank on each of two hosts."""
    with ExitStack() as stack:
        for core in (0, 1) if busy else ():
            stack.enter_context(contention(core, busy))
        ranks = [__file__, "--rank", "--rounds", str(rounds)]
        return job(ranks, 2, made, environ={"OMPI_MCA_mpi_yield_when_idle": yields})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.rank:
        rank(args.rounds)
        return
    rows, load = [], [os.getloadavg()[0]]
    rates: dict[tuple[str, str], dict[str, float]] = {}
    with joined(2) as made:
        for setting, (busy, yields) in SETTINGS.items():
            found = ranks_that_look(made, busy, yields, args.rounds)
            load.append(os.getloadavg()[0])
            for name in SIZES:
                alone = np.median(found["steps"][f"{name}/{NOBODY}"])
                for way in (ASKED, RGET):
                    key = f"{name}/{way}"
                    rates.setdefault((setting, name), {})[way] = float(np.mean(found["blocks"][key]))
                    brought, without = found["looks"].get(key, []), found["without"][key]
                    spread = Spread.of(brought or [np.nan])
                    rows.append(
                        {
                            "": setting,
                            "replica": name,
                            "by": way,
                            "replicas/s": f"{rates[setting, name][way]:.1f}",
                            "a look": readable(spread.median),
                            "p10 – p90": f"{readable(spread.p10)} – {readable(spread.p90)}",
                            "looks without": f"{without} of {without + len(brought)}",
                            "owner's steps": f"{np.median(found['steps'][key]) / alone:.2f}",
                        }
                    )
    ratios = [by[ASKED] / by[RGET] for by in rates.values() if by[RGET]]
    report(
        f"A rank gets {min(ratios):.1f} to {max(ratios):.0f} times as many replicas a second from a busy rank of "
        "another host by asking its process as by MPI's Rget",
        rows,
        "looking_between_hosts.md",
        [
            "Two hosts (network namespaces of this machine) with one rank and one core each; the owner multiplies "
            "matrices of 400 x 400, and publishes a replica after each product. The reader pauses for 5 ms "
            "between reads. "
            f"{args.rounds} blocks of {BLOCK:.0f} s of each way, in turn. Replicas per second: the mean of blocks. "
            "Seconds are those of successful reads. A read fails if the owner publishes twice while the slot is read, "
            f"three times in a row; or, by request, if no answer comes in {PATIENCE:g} s, and until it has come. Rget "
            "has no time limit here. The owner's steps: the median of blocks, relative to blocks without reads. Busy: "
            "beside a busy process on each of the two cores. Other work shared the cores: load before and after the "
            f"jobs {', '.join(f'{x:.0f}' for x in load)}.",
        ],
    )


if __name__ == "__main__":
    main()
