"""Ranks of several hosts exchange messages: `adaptive run -n 4 on_hosts.py 0,1,0,1 [WHERE:RANK]`; see test_on_hosts.py.

The numbers are the ranks' hosts, which are made up, or "found". A rank of the world that is named kills itself in the
middle of a message: before or after it has sent to its host's first rank, or received there ("before", "after"), or
before it passes on the results ("gather").
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

import collectives as comm
from adaptive.base.channel import SentMessage
from adaptive.base.world import MembersChanged
from collectives.compression._wire import Narrow
from collectives.worlds import mpi as _mpi
from collectives.worlds.reducing import custom_on_processes

HOSTS, DEATHS = sys.argv[1], [death.split(":") for death in sys.argv[2:]]
MESSAGES, SIZE, DIES_IN = 8, 700_001, 3
NARROW = [Narrow("bfloat16"), Narrow("bfloat16", stochastic=True)]


def made_up(comm, host, n_devices):
    found = all_processes(comm, host, n_devices)
    return tuple(p._replace(host=int(number)) for p, number in zip(found, HOSTS.split(","), strict=True))


all_processes = _mpi.all_processes
if HOSTS != "found":
    _mpi.all_processes = made_up


def dying(call, *, before):
    """Return a function that calls another one, and kills this rank before or after that."""

    def dies(*arguments):
        if before:
            os.kill(os.getpid(), signal.SIGKILL)
        call(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    return dies


def die(rank: int) -> None:
    for where, its in DEATHS:
        if int(its) == rank:
            name = "_all_gather" if where == "gather" else "_sum_on_host"
            setattr(
                custom_on_processes,
                name,
                dying(getattr(custom_on_processes, name), before=where in ("before", "gather")),
            )


def values(worker_slot: int, message: int) -> list[np.ndarray]:
    """A part with the status, a large one, an extreme, another large one, and two that travel in a narrow format: they
    differ by worker and message.
    """
    rng = np.random.default_rng([worker_slot, message])
    x = rng.normal(size=SIZE).astype(np.float32)
    whole = rng.integers(0, 1000, (600, 500)).astype(np.int32)
    return [x[:50_000].copy(), x, x[:1000], whole, x[:60_001], x[:20_000]]


with comm.world() as world:
    hosts = [process.host for process in world.transport.group.everyone]
    if HOSTS == "found":
        assert hosts == sorted(hosts), hosts
        assert len(set(hosts)) == 2, hosts
    lost = 0
    for message in range(MESSAGES):
        if message == DIES_IN:
            die(world.rank)
        while True:
            try:
                row = values(world.workers[0], message)
                row[0][-1] = 0
                parts = [[_mpi.jax.device_put(x) for x in row]]
                sent = SentMessage(parts, np.ones(1, np.float32), f"message {message}")
                (got,), said = world.exchange(sent, ["sum", "sum", "max", "sum", *NARROW], "a channel")
                break
            except MembersChanged:
                lost += 1
        assert said == world.processes, said
        parts = [np.asarray(x) for x in got]
        everyone = [values(worker_slot, message) for worker_slot in world.members]
        for j in (0, 1):
            error = np.abs(parts[j] - np.sum([row[j] for row in everyone], axis=0, dtype=np.float64))
            assert error[: 50_000 - 1].max() < 1e-5, (j, error.max())
        np.testing.assert_array_equal(parts[2], np.max([row[2] for row in everyone], axis=0))
        np.testing.assert_array_equal(parts[3], np.sum([row[3] for row in everyone], axis=0))
        for j in (4, 5):  # what each sends is rounded, and what comes; and what a host sends in between
            sent = np.abs([row[j] for row in everyone]).sum(axis=0)
            assert (np.abs(parts[j] - np.sum([row[j] for row in everyone], axis=0)) <= 3 * 2**-7 * sent).all()
            assert np.abs(parts[j] - np.sum([row[j] for row in everyone], axis=0)).max() > 0
        bits = b"".join([parts[0][:-1].tobytes(), *(x.tobytes() for x in parts[1:])])
        assert len(set(world.all_gather_bytes(bits))) == 1  # the same on all ranks, to the last bit
    assert bool(lost) == bool(DEATHS), lost
    print(f"{world.processes} ended well", flush=True)
