"""A loop for the global batch and one for its split, at one barrier: in this order, and then at rest."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import collectives as comm
import controllers as ctrl
import monitors as mon

from .problems import build, descend, make_data, same_everywhere
from .test_policies import emulated_seconds

COVERS = ("controllers/policies/balance.py", "controllers/policies/noise_batch.py")

MILLISECONDS = np.array([0.1, 0.4, 0.2, 0.1, 0.3])
SCALE = 140.0  # the noise scale: between two batches that can be


def slowest(sizes, milliseconds) -> float:
    return float((2.0 + milliseconds * np.array(sizes)).max())


def test_both_loops_converge_and_the_split_is_of_the_new_batch(world, free_calls):
    n = world.size
    milliseconds = MILLISECONDS[:n]

    def driver(state, batch):
        noise = mon.NoiseScale(*(jnp.float32(value) for value in (SCALE, 1.0, 1.0, 0.9 * SCALE, 1.1 * SCALE)))
        seconds = comm.all_gather(emulated_seconds(jnp.asarray(milliseconds, jnp.float32)))
        ctrl.hook(ctrl.noise_batch(max_batch=256), noise, every=10)
        ctrl.hook(ctrl.balance(), seconds, every=5)
        return descend(state, batch)

    with build(driver, 0.0, make_data(320), 32, world=world, resizable=True) as program:
        program.warm_up()
        reports = list(program.run(steps=100))
    assert same_everywhere(world, [r.batch_sizes for r in reports])
    batches = [r.global_batch for r in reports]
    grown = [k for k in range(1, 100) if batches[k] > batches[k - 1]]
    assert 0.8 * SCALE < batches[-1] <= 1.1 * SCALE
    assert len(grown) >= 2
    for k in grown:  # a growth keeps the split, or betters it: it is decided for the new batch at the same barrier
        assert reports[k - 1].step % 10 == 0
        before = np.array(reports[k - 1].batch_sizes) * (batches[k] / batches[k - 1])
        assert slowest(reports[k].batch_sizes, milliseconds) <= 1.02 * slowest(np.ceil(before), milliseconds)
    assert not any(r.decision for r in reports[60:])
    ideal = 2.0 + batches[-1] / np.sum(1 / milliseconds)
    assert slowest(reports[-1].batch_sizes, milliseconds) < 1.05 * ideal
