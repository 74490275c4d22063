"""A rank dies in a message, and the next message of the same channel is under way; see test_losses.py.

`adaptive run -n 3 right_behind.py CASE WAY`. A channel has one set of receive buffers, so what a message has brought
must not be overwritten before all have it. In the case "half completed" one rank has completed message 2 and waits in
message 3, one gets the error about a lost rank in message 2, and gets its results from the first. In the case "in the
midst" the rank dies between the two parts of message 3.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import jax
import numpy as np
import psutil

import collectives as comm
from adaptive.base.channel import PartSpec
from adaptive.base.world_messages import MembersChanged
from collectives.worlds.transport import operations

(CASE, WAY), DIES, HEARS, MESSAGES, STATUS = sys.argv[1:], 2, 1, 5, 5
SHAPES = (2000,), (300, 700)  # part 0 has no room in the frame


def values(worker_slot: int, message: int) -> list[np.ndarray]:
    rng = np.random.default_rng([worker_slot, message])
    return [rng.integers(0, 1000, shape).astype(np.float32) for shape in SHAPES]


def is_there(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def arrive(self, status) -> None:
    vars(self)["arrived"] = status
    if CASE == "half completed" and world.transport.inside and self.about == "message 2" and own == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    if CASE == "half completed" and world.transport.inside and self.about == "message 2" and own == HEARS and not heard:
        heard.append(2)
        while is_there(pids[DIES]):
            time.sleep(0.001)
        for buffer in channel._buffers.buffers:
            buffer[...] = np.nan
        vars(self)["arrived"] = status * np.nan
        raise world.transport.mpi.Exception(world.transport.mpi.ERR_PROC_FAILED)


class Dying:
    """A communicator whose process dies after the second sum: that of the preamble, and that of part 0."""

    def __init__(self, comm):
        self._comm, self._sums = comm, 0

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def Allreduce(self, *arguments) -> None:
        self._comm.Allreduce(*arguments)
        self._sums += 1
        if self._sums == 2:
            os.kill(os.getpid(), signal.SIGKILL)


heard: list[int] = []
operations.ReduceMessage.arrived = property(lambda self: vars(self)["arrived"], arrive)
with comm.world() as world:
    own = world.workers[0]
    pids = [int(pid) for pid in world.all_gather_bytes(str(os.getpid()).encode())]
    channel = world.channel([PartSpec(shape, np.dtype(np.float32), "sum") for shape in SHAPES], STATUS, "a message")
    if WAY == "general":
        channel._fast = False
    message, changed = 1, []
    while message <= MESSAGES:
        members = world.members
        parts = [[jax.device_put(x) for x in values(own, message)]]
        if CASE == "in the midst" and own == DIES and message == 3:
            world.transport.comm = Dying(world.transport.comm)
        try:
            results, status = channel.exchange(parts, np.full(STATUS, message, np.float32), f"message {message}")
        except MembersChanged:
            changed.append(message)
            continue
        expected = [
            sum(columns) for columns in zip(*(values(worker_slot, message) for worker_slot in members), strict=True)
        ]
        np.testing.assert_array_equal(results[0][0][:-STATUS], expected[0][:-STATUS])
        np.testing.assert_array_equal(results[0][1], expected[1])
        np.testing.assert_array_equal(status, np.full(STATUS, message * len(members)))
        message += 1
    assert world.members == (0, 1), world.members
    assert changed == [3], changed
    assert bool(heard) == (CASE == "half completed" and own == HEARS)
    print(f"rank {own} has all messages", flush=True)
print(f"rank {own} ended well", flush=True)
