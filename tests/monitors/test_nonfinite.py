"""The share of examples whose gradients are not finite."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive.runtime.local_world import LocalWorld

SIZES = (6, 4, 2)
DATA = np.random.default_rng(0).normal(size=(96, 3)).astype(np.float32)


def test_the_share_of_values_that_are_not_finite():
    def driver(w, batch):
        grads = {"w": jnp.where(ad.worker_index() == 1, jnp.nan, batch.mean()), "n": jnp.zeros(2)}
        share = mon.nonfinite(grads)
        of_counts = mon.nonfinite(len(batch) * jnp.arange(3))
        return w + comm.all_reduce(grads, nonfinite="drop")["w"], {"share": share, "of counts": of_counts}

    program = ad.Program(driver, jnp.zeros(()), DATA, global_batch=12, shares=SIZES, world=LocalWorld(3), microbatch=2)
    metrics = program.step().metrics
    np.testing.assert_allclose(metrics["share"], 4 / 12, rtol=1e-6)
    assert metrics["of counts"] == 0
