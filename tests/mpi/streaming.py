"""Streamed rounds on ranks, of which one is lost, one leaves and one joins, beside the same in one process.

`adaptive run -n 3 streaming.py [sparse]`; see test_streaming.py. With `sparse`, fragments are sent by their largest
elements, and what is not sent is kept for the next time.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import adaptive as ad
import collectives as comm
import collectives.strategies as sync
from adaptive.runtime.local_world import LocalWorld

jax.config.update("jax_enable_x64", True)

STEPS, N = 16, 301
DATA = {"x": np.random.default_rng(0).normal(size=(480, N))}
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
SPARSE = "sparse" in sys.argv
WIRE = {"wire": comm.top_k(20, of=101)} if SPARSE else {}
STRATEGY = sync.streamed(optax.sgd(0.1, momentum=0.5), OUTER, steps=6, fragments=3, **WIRE)


def value_and_grad(params, batch):
    return batch["x"].sum(), jnp.tanh(params - batch["x"].mean(0))


def driver(state, batch):
    state, loss = STRATEGY.step(state, value_and_grad, batch)
    return state, {"loss": comm.all_reduce(loss)}


def built(world):
    options = {"global_batch": 12, "world": world, "seed": 3, "deterministic": True}
    return ad.Program(driver, STRATEGY.init(jnp.zeros(N)), DATA, per_worker_state=STRATEGY.per_worker_state, **options)


def follow(twin, report, members):
    """Take the same step in one process, with the same members. Return these."""
    for worker in sorted({*members} ^ {*report.members}):
        (twin.world.leave if worker in members else twin.world.join)(worker)
    expected = twin.step()
    assert expected.batch_sizes == report.batch_sizes, (report, expected)
    return report.members


with comm.world() as world:
    own, members = world.workers[0], (0, 1, 2)
    program, twin = built(world), built(LocalWorld(3))
    for report in program.run(steps=STEPS):
        bits = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves((program.state.params, program.state.outer)))
        assert len(set(world.all_gather_bytes(bits))) == 1, f"states differ after step {report.step}"
        if own == 0:
            members = follow(twin, report, members)
            for a, b in zip(jax.tree.leaves(program.state), jax.tree.leaves(twin.state), strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 if SPARSE else 1e-12, err_msg=str(report))
        if report.step == 4 and own == 2:  # between two fragments of a round
            os.kill(os.getpid(), signal.SIGKILL)
        if report.step == 7:
            assert report.members == (0, 1), report
            program.rescale(workers=1)
        if report.step == 10:
            assert report.members == (0,), report
            program.rescale(workers=2)
        while report.step == 11 and own == 0 and not world.poll_ready():
            time.sleep(0.001)
    assert report.members == (0, 1), report
    assert np.abs(program.state.params).max() > 0.01
print(f"rank {own} ended well", flush=True)
