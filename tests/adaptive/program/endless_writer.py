"""A job that writes checkpoints until it is killed: `endless_writer.py RUN EVERY`. See test_checkpoints.py."""

from __future__ import annotations

import sys

import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm


def driver(state, batch):
    return state + comm.all_reduce(batch["x"].mean()), {}


with ad.Program(driver, jnp.zeros(1 << 18), {"x": np.ones(64, np.float32)}, global_batch=4) as program:
    program.restore(sys.argv[1], missing_ok=True)
    checkpoint = ad.Checkpoints(sys.argv[1], every=int(sys.argv[2]), keep=2)
    list(program.run(steps=1, checkpoint=checkpoint))
    print("ready", flush=True)
    while True:
        list(program.run(steps=4, checkpoint=checkpoint))
