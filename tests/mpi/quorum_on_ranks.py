"""Rounds by quorum on ranks, of which the last is slow, and another is lost; see test_quorum_on_ranks.py.

`adaptive run -n 3 quorum_on_ranks.py`. Kernels sleep in a callback, so that who is slow does not depend on the machine.
"""

from __future__ import annotations

import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import adaptive as ad
import collectives as comm
import collectives.strategies as sync

STEPS, LOSS, SLOW = 12, 9, 2
STRATEGY = sync.quorum(optax.sgd(0.1), optax.sgd(1.0), steps=6, quorum=2)


is_slow = os.environ["OMPI_COMM_WORLD_RANK"] == str(SLOW)


def sleep(loss):
    time.sleep(0.1 if is_slow else 0.002)
    return np.asarray(loss)


def value_and_grad(params, batch):
    loss = jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.float32), batch.mean())
    return loss, jnp.tanh(params - batch.mean(0))


def driver(state, batch):
    state, loss = STRATEGY.step(state, value_and_grad, batch)
    return state, {"loss": comm.all_reduce(loss), "taken": comm.all_gather(state.taken)}


with comm.world() as world:
    own, counted, late = world.workers[0], [], []
    data = np.random.default_rng(0).normal(size=(480, 5)).astype(np.float32)
    options = {"global_batch": 36, "world": world, "per_worker_state": STRATEGY.per_worker_state, "seed": 3}
    program = ad.Program(driver, STRATEGY.init(jnp.zeros(5)), data, **options)
    for report in program.run(steps=STEPS):
        bits = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(program.state[:3]))
        assert len(set(world.all_gather_bytes(bits))) == 1, f"states differ after step {report.step}"
        counted.append(int(program.state.counted))
        late.append(int(np.asarray(report.metrics["taken"])[SLOW]))
        if report.step == LOSS and own == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    assert report.members == (0, 2), report
    # Of three, two close a round. The slow one goes on with its local steps, and is counted when it has six.
    assert set(counted[:LOSS]) == {2, 3}, counted
    assert max(late) < 6, late
    assert np.count_nonzero(late[: LOSS - 1]) > 1, late
    # Of two, both are needed.
    assert set(counted[LOSS:]) == {2}, counted
    assert set(late[LOSS:]) == {0}, late
print(f"rank {own} ended well", flush=True)
