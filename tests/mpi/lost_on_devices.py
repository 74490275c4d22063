"""A rank dies while a large sum goes from device to device: `adaptive run -n 3 lost_on_devices.py SWAP`; see
test_losses.py.

Rank 1 kills itself when it has sent to one of the others, in the first or the second swap of its third message: so some
have slices, or sums, of a rank that is gone, and others do not. Who is left takes the message again.
"""

from __future__ import annotations

import os
import signal
import sys
from unittest.mock import patch

import jax
import numpy as np

from adaptive.base.world_messages import MembersChanged
from collectives.worlds.mpi import MPIWorld
from collectives.worlds.reducing.cuda_aware import DEVICES, DeviceAccess

SWAP, DIES, N = int(sys.argv[1]), 1, 300_007


def dying(swap):
    """In its `SWAP`-th call of the third message it sends to the first of the others only."""
    calls = []

    def wrapped(comm, sent, received, nbytes, memory):
        calls.append(1)
        if len(calls) == 4 + SWAP:
            other, address = sent[0]
            comm.Send(world.transport.mpi.buffer.fromaddress(address, nbytes), other, 7104)
            os.kill(os.getpid(), signal.SIGKILL)
        swap(comm, sent, received, nbytes, memory)

    return wrapped


def value(worker: int, step: int) -> np.ndarray:
    return np.random.default_rng([worker, step]).integers(-1000, 1000, N).astype(np.float32)


with patch("collectives.worlds.reducing.cuda_aware.reach", lambda *_: DeviceAccess("")):
    world = MPIWorld()
world.transport.cuda_sums.always = DEVICES
with world:
    assert world.survives
    own, again = world.workers[0], 0
    if own == DIES:
        world.transport.cuda_sums._swap = dying(world.transport.cuda_sums._swap)
    for step in range(6):
        while True:
            parts = [[jax.device_put(np.zeros(1, np.float32)), jax.device_put(value(own, step))]]
            try:
                (results,), status = world.exchange(parts, ["sum", "sum"], np.ones(1, np.float32))
                break
            except MembersChanged:
                again += 1
        np.testing.assert_array_equal(results[1], sum(value(worker, step) for worker in world.members))
        assert status == len(world.members)
    assert world.members == (0, 2)
    assert again == 1
    assert not world.transport.cuda_sums._held
    print(f"worker {own} ended well", flush=True)
