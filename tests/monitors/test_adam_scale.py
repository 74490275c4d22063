"""Adam's divisor of gradients, and the noise scale that is divided by it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive.runtime.local_world import LocalWorld
from tests.relaxed import relaxed_tx

ADAM = relaxed_tx(optax.scale_by_adam(b2=0.99))
SIZE = 200
RNG = np.random.default_rng(4)
MEAN = RNG.standard_normal(SIZE).astype(np.float32) * 0.3
DEVIATION = RNG.uniform(0.5, 2, SIZE).astype(np.float32)


def test_it_is_what_adam_divides_by():
    optimizer, params = relaxed_tx(optax.adam(1.0, b1=0.0, b2=0.99, eps=1e-3)), {"w": jnp.zeros(3)}
    state = optimizer.init(params)
    assert np.isnan(mon.adam_scale(state, b2=0.99)["w"]).all()  # before the first update
    for step in range(3):
        grads = {"w": jnp.array([1.0, -2.0, 0.5]) * (step + 1)}
        updates, state = optimizer.update(grads, state, params)
        np.testing.assert_allclose(mon.adam_scale(state, b2=0.99, eps=1e-3)["w"], -grads["w"] / updates["w"], rtol=1e-5)


def test_the_noise_scale_is_that_of_the_divided_gradients():
    """Of gradients N(MEAN, DEVIATION^2 / batch), with a divisor near the root of their mean square."""
    batch = 16
    data = MEAN + DEVIATION * np.random.default_rng(1).standard_normal((200 * batch, SIZE)).astype(np.float32)

    def driver(state, batch):
        grads = batch.mean(0)
        avg_grads = comm.all_reduce(grads)
        noise = mon.noise_scale(grads, avg_grads, divide_by=mon.adam_scale(state, b2=0.99), decay=0)
        _, state = ADAM.update(avg_grads, state)
        return state, noise

    with ad.Program(
        driver, ADAM.init(jnp.zeros(SIZE)), data, global_batch=batch, world=LocalWorld(2), resizable=False
    ) as program:
        noise = [report.metrics for report in program.run(steps=400)][100:]  # the divisor is settled by then
    p = MEAN**2 + DEVIATION**2 / batch
    expected = np.sum(DEVIATION**2 / p) / np.sum(MEAN**2 / p)
    found = np.mean([one.trace for one in noise]) / np.mean([one.signal for one in noise])
    np.testing.assert_allclose(found, expected, rtol=0.1)


def test_states_without_moments_are_refused():
    with pytest.raises(ad.CollectiveError, match=r"^adam_scale \(test_adam_scale.py:\d+\): .*contains 0"):
        mon.adam_scale(optax.sgd(0.1, momentum=0.9).init(jnp.ones(3)))
    two = optax.chain(optax.scale_by_adam(), optax.scale_by_adam()).init(jnp.ones(3))
    with pytest.raises(ad.CollectiveError, match="contains 2"):
        mon.adam_scale(two)
    with pytest.raises(ad.CollectiveError, match=r"adam_scale \(test_adam_scale.py:\d+\): b2=1"):
        mon.adam_scale(optax.adam(0.1).init(jnp.ones(3)), b2=1)


def test_a_divisor_belongs_to_the_gradients_of_groups():
    grads, other = {"w": jnp.ones(3)}, {"w": 2 * jnp.ones(3)}
    with pytest.raises(ad.CollectiveError, match="divide_by must have the structure and shapes"):
        mon.noise_scale(grads, other, divide_by={"w": jnp.ones(2)})
    with pytest.raises(ad.CollectiveError, match="exclude each other"):
        mon.noise_scale(grads, other, divide_by=grads, per_example={"w": jnp.ones(4)})

    def of_this_step(state, batch):
        grads = batch.mean(0)
        avg_grads = comm.all_reduce(grads)
        _, state = ADAM.update(avg_grads, state)
        return state, mon.noise_scale(grads, avg_grads, divide_by=mon.adam_scale(state))

    with pytest.raises(ad.CollectiveError, match="known before the step"):
        ad.Program(of_this_step, ADAM.init(jnp.zeros(3)), np.ones((8, 3), np.float32), global_batch=4)
