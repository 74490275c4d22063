"""Ranks on hosts that are made up exchange and compute: `adaptive run -n 3 beside.py [RANK]`; see test_beside.py.

A rank that is named kills itself in the midst of a message, when some of its pieces have come and others are under way.
"""

from __future__ import annotations

import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm
from adaptive.base.channel import PartSpec
from adaptive.base.world_messages import MembersChanged
from collectives.worlds import mpi as _mpi
from collectives.worlds.reducing import overlapped
from collectives.worlds.transport import mpi_channel as _channel

DIES = int(sys.argv[1]) if len(sys.argv) > 1 else -1
MESSAGES, SIZE, OPS = 6, 100_001, ["sum", "sum", "max", "sum"]


def made_up(comm, host, n_devices):
    return tuple(p._replace(host=number) for number, p in enumerate(all_processes(comm, host, n_devices)))


all_processes = _mpi.all_processes
_mpi.all_processes = made_up
overlapped.PIECE_BYTES = 16 << 10
channels = {}  # by whether nothing is computed beside


def values(worker_slot: int, message: int) -> list[np.ndarray]:
    """A part with the status, a large one, an extreme and integers: differ by worker and message."""
    rng = np.random.default_rng([worker_slot, message])
    x = rng.normal(size=SIZE).astype(np.float32)
    return [x[:10_000].copy(), x, x[:9000], rng.integers(0, 1000, (60, 500)).astype(np.int32)]


class Computing:
    """A computation that is done after so many looks at it."""

    def __init__(self, looks):
        self.looks = looks

    def __call__(self):
        self.looks -= 1
        return self.looks > 0


def in_time(row, message, computing=None):
    pieces = []

    def look(part, start, piece):
        pieces.append((part, piece.size))
        if message == 2 and len(pieces) == 20 and own == DIES:
            os.kill(os.getpid(), signal.SIGKILL)

    # A buffer is looked at where it arrives: results of another message must not be written to by this one.
    alone = computing is None
    if alone not in channels:
        layout = [PartSpec(x.shape, x.dtype, op) for x, op in zip(row, OPS, strict=True)]
        channels[alone] = world.channel(layout, 1, f"channel of {alone}")
    arguments = np.ones(1, np.float32), f"message {message}", "", look, message, computing
    arriving = channels[alone].start([[jax.device_put(x) for x in row]], *arguments)
    (got,), said = arriving.wait()
    assert said == world.processes, said
    assert sum(size for part, size in pieces if part == 1) == SIZE
    return [np.array(x) for x in got], len([part for part, _ in pieces if part == 1])


def trains_in_stages():
    """As in one piece, and all but a step's last message is sent beside."""
    sums = []

    def counted(*arguments, **options):
        sums.append(arguments[2].target.size)
        return overlapped_sum(*arguments, **options)

    def loss(params, batch):
        x = batch["x"]
        for p in params:
            x = jnp.tanh(x @ p)
        return jnp.square(x).mean()

    def driver(params, batch):
        grads = comm.all_reduce(jax.grad(loss)(params, batch))
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], {}

    overlapped_sum, _channel.overlapped_sum = _channel.overlapped_sum, counted
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=(150, 150), scale=0.1), jnp.float32) for _ in range(3)]
    data, states = {"x": rng.normal(size=(60, 150)).astype(np.float32)}, []
    for stages in (False, 3):
        options = {"global_batch": 12, "resizable": False, "overlap": stages}
        with ad.Program(driver, params, data, world=world, **options) as program:
            for _ in range(4):
                program.step()
            states.append(program.state)
    for one, other in zip(*states, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert len(sums) == 4 * 2, sums


with comm.world() as world:
    own, lost = world.rank, 0
    for message in range(MESSAGES):
        row = values(world.workers[0], message)
        while True:
            try:
                row[0][-1] = 0
                # One is done at once, and one computes until the end of it.
                parts, pieces = in_time(row, message, Computing(10**6 * (world.rank == 1)))
                whole, pieces_of_whole = in_time(row, message)
                break
            except MembersChanged:
                lost += 1
        assert pieces > 20 > pieces_of_whole == 1, (pieces, pieces_of_whole)
        everyone = [values(worker_slot, message) for worker_slot in world.members]
        for j in (0, 1):
            expected = np.sum([row[j] for row in everyone], axis=0, dtype=np.float64)
            np.testing.assert_allclose(parts[j][:9999], expected[:9999], atol=1e-5)
            np.testing.assert_allclose(whole[j][:9999], expected[:9999], atol=1e-5)
        np.testing.assert_array_equal(parts[2], np.max([row[2] for row in everyone], axis=0))
        np.testing.assert_array_equal(parts[3], np.sum([row[3] for row in everyone], axis=0))
        bits = b"".join([parts[0][:-1].tobytes(), *(x.tobytes() for x in parts[1:])])
        assert len(set(world.all_gather_bytes(bits))) == 1  # the same on all ranks, to the last bit
    assert bool(lost) == (DIES >= 0), lost
    assert not overlapped._left
    if not lost:
        trains_in_stages()
    print(f"{world.processes} ended well", flush=True)
