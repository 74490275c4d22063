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
from adaptive.runtime.local_world import LocalWorld
from tests.problems import build, make_data


class Rows(Collective):
    """Every worker sends its row, and has the rows of all."""

    def sent_shape(self, shape, capacity):
        return (capacity, *shape)

    def encode(self, x, worker, capacity):
        return jnp.zeros((capacity, *x.shape), x.dtype).at[worker].set(x)


@dataclass(frozen=True)
class Median(Rows):
    """The middle of what the workers have."""

    name = "median"

    def decode(self, x, worker, capacity):
        return jnp.median(x, axis=0)


@dataclass(frozen=True)
class Shifted(Rows):
    """What the worker `by` places further on has: another value on each worker."""

    by: int

    name = "shifted"
    result_is_replicated = False

    def decode(self, x, worker, capacity):
        return x[(worker + self.by) % capacity]

    @property
    def about(self):
        return f"shifted(by={self.by})"


def median(x):
    return collective(Median(), [x])[0]


def shifted(x, by=1):
    return collective(Shifted(by), [x])[0]


def test_in_a_program():
    def driver(state, batch):
        own = jnp.square(ad.worker_index().astype(jnp.float32) - 1) + state * jnp.arange(2.0)
        gathered = comm.all_gather({"own": own, "next": shifted(own), "second": shifted(own, 2)})
        return state + 1, {**gathered, "median": median(own)}

    with build(driver, 0.0, make_data(), 24, world=LocalWorld(3)) as program:
        for step in range(3):
            found = program.step().metrics
            rows = np.square(np.arange(3) - 1.0)[:, None] + step * np.arange(2.0)
            np.testing.assert_allclose(found["own"], rows)
            np.testing.assert_allclose(found["next"], np.roll(rows, -1, axis=0))
            np.testing.assert_allclose(found["second"], np.roll(rows, -2, axis=0))
            np.testing.assert_allclose(found["median"], np.median(rows, axis=0))


def test_values_that_all_workers_have_are_not_sent():
    def driver(state, batch):
        mean = comm.all_reduce(batch["x"].mean())
        return state, {"mean": mean, "median": median(mean), "next": shifted(mean)}

    with build(driver, 0.0, make_data(), 24, world=LocalWorld(3)) as program:
        report = program.step()
    assert report.messages == 1
    assert report.metrics["mean"] == report.metrics["median"] == report.metrics["next"]


def test_a_value_of_the_batch_needs_the_whole_local_batch():
    def driver(state, batch):
        return state, {"median": median(batch["x"].mean())}

    with build(driver, 0.0, make_data(), 8, world=comm.SoloWorld(), resizable=True) as program:
        assert "one microbatch" in program.explain()
        assert "median (test_extend.py" in program.explain()


def test_outside_a_program():
    with comm.SoloWorld():
        np.testing.assert_allclose(median(jnp.asarray([2.0, 7.0])), [2.0, 7.0])
        np.testing.assert_allclose(jax.vmap(median)(jnp.ones(3)), np.ones(3))


def local_state(state, batch):
    return shifted(state + ad.worker_index().astype(float)), {}


def differentiated(state, batch):
    return state - jax.grad(lambda s: median(s * batch["x"].mean()))(state), {}


@pytest.mark.parametrize(
    ("driver", "error", "says"),
    [
        (local_state, ad.ReplicationError, r"comes from shifted, whose result differs between workers"),
        (differentiated, ad.CollectiveError, "calls median "),
    ],
)
def test_what_is_refused_names_it(driver, error, says):
    with pytest.raises(error, match=says):
        build(driver, 0.0, make_data(), 8, world=comm.SoloWorld())
