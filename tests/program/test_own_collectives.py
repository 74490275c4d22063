"""User-defined collectives: a class and a call, on every world, in programs and outside of them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.operators.collectives import Collective, collective

from .problems import build, make_data


@dataclass(frozen=True)
class Median(Collective):
    """The middle of what the workers have: every worker sends its row, and takes the median of all."""

    name = "median"

    def sent_shape(self, shape, capacity):
        return (capacity, *shape)

    def encode(self, x, worker, capacity):
        return jnp.zeros((capacity, *x.shape), x.dtype).at[worker].set(x)

    def decode(self, x, worker, capacity):
        return jnp.median(x, axis=0)


@dataclass(frozen=True)
class Shifted(Collective):
    """What the worker `by` places further on has: another value on each worker."""

    by: int

    name = "shifted"
    result_is_replicated = False

    def sent_shape(self, shape, capacity):
        return (capacity, *shape)

    def encode(self, x, worker, capacity):
        return jnp.zeros((capacity, *x.shape), x.dtype).at[worker].set(x)

    def decode(self, x, worker, capacity):
        return x[(worker + self.by) % capacity]

    @property
    def about(self):
        return f"shifted(by={self.by})"


def median(x):
    return collective(Median(), [x])[0]


def shifted(x, by=1):
    return collective(Shifted(by), [x])[0]


def test_in_a_program(world):
    def driver(state, batch):
        del batch
        own = jnp.square(ad.worker_index().astype(jnp.float32) - 1) + state * jnp.arange(2.0)
        gathered = comm.all_gather({"own": own, "next": shifted(own), "second": shifted(own, 2)})
        return state + 1, {**gathered, "median": median(own)}

    with build(driver, 0.0, make_data(), 8 * world.size, world=world) as program:
        for step in range(3):
            found = program.step().metrics
            rows = np.square(np.arange(world.size) - 1.0)[:, None] + step * np.arange(2.0)
            np.testing.assert_allclose(found["own"], rows)
            np.testing.assert_allclose(found["next"], np.roll(rows, -1, axis=0))
            np.testing.assert_allclose(found["second"], np.roll(rows, -2, axis=0))
            np.testing.assert_allclose(found["median"], np.median(rows, axis=0))


def test_values_that_all_workers_have_are_not_sent(world):
    def driver(state, batch):
        mean = comm.all_reduce(batch["x"].mean())
        return state, {"mean": mean, "median": median(mean), "next": shifted(mean)}

    with build(driver, 0.0, make_data(), 8 * world.size, world=world) as program:
        report = program.step()
    assert report.messages == 1
    assert report.metrics["mean"] == report.metrics["median"] == report.metrics["next"]


def test_a_value_of_the_batch_needs_the_whole_local_batch():
    def driver(state, batch):
        return state, {"median": median(batch["x"].mean())}

    with build(driver, 0.0, make_data(), 8, world=comm.SoloWorld(), resizable=True) as program:
        assert "one microbatch" in program.explain()
        assert "median (test_own_collectives.py" in program.explain()


def test_results_that_differ_between_workers_are_refused_in_the_state():
    with pytest.raises(ad.ReplicationError, match=r"comes from shifted, whose result differs between workers"):
        build(
            lambda state, batch: (shifted(state + ad.worker_index().astype(float)), {}),
            0.0,
            make_data(),
            8,
            world=comm.SoloWorld(),
        )


def test_outside_a_program(world):
    with world:
        rank = float(world.rank)
        found = median(jnp.asarray([rank, 7.0]))
        if world.processes == world.size:
            np.testing.assert_allclose(found, [np.median(np.arange(world.processes)), 7.0])
        np.testing.assert_allclose(jax.vmap(median)(jnp.ones(3)), np.ones(3))


def test_gradients_through_it_are_refused_by_its_name():
    def driver(state, batch):
        return state - jax.grad(lambda s: median(s * batch["x"].mean()))(state), {}

    with pytest.raises(ad.CollectiveError, match="calls median "):
        build(driver, 0.0, make_data(), 8, world=comm.SoloWorld())
