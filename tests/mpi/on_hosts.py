"""Ranks of several hosts sum by hosts: `adaptive run -n 4 on_hosts.py 0,1,0,1 [WHERE:RANK …]`; see test_on_hosts.py.

The numbers are the ranks' hosts, which are made up, or "found". A rank that is named kills itself there: before it adds
up "within" its host; "between" hosts, or when it has "begun" or "added" there; or "behind" the sum. All in a piece in
the middle of a message.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial

import numpy as np

import collectives as comm
from adaptive.base.world_messages import MembersChanged
from collectives._wire import Narrow
from collectives.worlds import mpi as _mpi
from collectives.worlds.reducing import algorithms, hierarchical
from collectives.worlds.reducing.autotune import TRIALS
from collectives.worlds.reducing.hierarchical import HierarchicalSum

HOSTS, DEATHS = sys.argv[1], [death.split(":") for death in sys.argv[2:]]
MESSAGES, SIZE = 8, 700_001
own = -1


def made_up(comm, host, n_devices):
    found = all_processes(comm, host, n_devices)
    return tuple(p._replace(host=int(number)) for p, number in zip(found, HOSTS.split(","), strict=True))


class Dying:
    """A communicator, in which this rank dies when it has called one of its methods so often, or is about to."""

    def __init__(self, comm, method, times, *, before):
        self._comm, self._method, self._times, self._before = comm, method, times, before

    def __getattr__(self, name):
        method = getattr(self._comm, name)
        return partial(self._call, method) if name == self._method else method

    def _call(self, method, *arguments):
        self._times -= 1
        if self._before and self._times == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        result = method(*arguments)
        if self._times == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


PIECE = 5  # of the first message that goes by hosts
SENDS = 2 * len(set(HOSTS.split(","))) - 2  # of a leader, for each piece
DEATHS_AT = {
    "within": ("_within", "Reduce", PIECE, True),
    "between": ("_between", "Isend", PIECE * SENDS, True),
    "begun": ("_between", "Isend", SENDS // 2, False),
    "added": ("_between", "Isend", PIECE * SENDS, False),
    "behind": ("_within", "Bcast", PIECE, False),
}


def made_to_die(self, *arguments, **options):
    make(self, *arguments, **options)
    for where, rank in DEATHS:
        if int(rank) == own:
            comm, method, times, before = DEATHS_AT[where]
            setattr(self, comm, Dying(getattr(self, comm), method, times, before=before))


all_processes = _mpi.all_processes
if HOSTS != "found":
    _mpi.all_processes = made_up
make = HierarchicalSum.__init__
HierarchicalSum.__init__ = made_to_die
# As many pieces as of large messages; and the pipeline is full, long before the end.
hierarchical.PIECE_BYTES, hierarchical.UNDER_WAY_BYTES = 300_000, 500_000


def values(worker_slot: int, message: int) -> list[np.ndarray]:
    """A part with the status, a large one, an extreme, another large one, and two that travel in a narrow format: they
    differ by worker and message.
    """
    rng = np.random.default_rng([worker_slot, message])
    x = rng.normal(size=SIZE).astype(np.float32)
    whole = rng.integers(0, 1000, (600, 500)).astype(np.int32)
    return [x[:50_000].copy(), x, x[:1000], whole, x[:60_001], x[:20_000]]


NARROW = [Narrow("bfloat16"), Narrow("bfloat16", stochastic=True)]


with comm.world() as world:
    own = world.rank
    world.deterministic = "fixed" in os.environ.get("TESTS_WAY", "")
    lost = 0
    for message in range(MESSAGES):
        while True:
            try:
                ops, status = ["sum", "sum", "max", "sum", *NARROW], np.ones(1, np.float32)
                row = values(world.workers[0], message)
                row[0][-1] = 0
                (got,), said = world.exchange(
                    [[_mpi.jax.device_put(x) for x in row]],
                    *(ops, status, "a channel", f"message {message}"),
                )
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
        for j in (4, 5):  # what each sends is rounded, and what comes; and what a host sends in between, perhaps
            sent = np.abs([row[j] for row in everyone]).sum(axis=0)
            assert (np.abs(parts[j] - np.sum([row[j] for row in everyone], axis=0)) <= 3 * 2**-7 * sent).all()
            assert np.abs(parts[j] - np.sum([row[j] for row in everyone], axis=0)).max() > 0
        bits = b"".join([parts[0][:-1].tobytes(), *(x.tobytes() for x in parts[1:])])
        assert len(set(world.all_gather_bytes(bits))) == 1  # the same on all ranks, to the last bit
        if message < TRIALS and not DEATHS and not world.deterministic:
            assert world.algorithm("a channel") in ("", "flat and hierarchical in turn, to measure which is faster")
    said = world.all_gather_bytes(world.algorithm("a channel").encode())
    assert len(set(said)) == 1, said
    assert bool(lost) == bool(DEATHS), lost
    assert world.algorithm("another") == ""
    assert algorithms.LARGE_BYTES < 4 * 50_000
    print(f"{world.processes} ended well, {said[0].decode() or 'one way'}", flush=True)
