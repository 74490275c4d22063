"""`neighbor_mean` by each schedule, against its weights in numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.runtime.local_world import LocalWorld
from collectives._neighbor_mean import schedule_of

from .linear import states

PAIRS = [[(0, 1), (2, 3)], [(1, 2)]]


def program_of(schedule, workers=4, **options):
    """Each worker's values are its own number, to begin with."""

    def driver(state, batch):
        own = jax.tree.map(
            lambda x: jnp.where(ad.step_number() == 0, x + ad.worker_index().astype(jnp.float32).astype(x.dtype), x),
            state,
        )
        return comm.neighbor_mean(own, schedule), {"loss": comm.all_reduce(batch.mean())}

    state = {"m": np.zeros((2, 3), np.float32), "s": np.float32(0), "z": np.zeros(2, np.complex64)}
    options = {"world": LocalWorld(workers), "per_worker_state": lambda s: s, "resizable": False, **options}
    return ad.Program(driver, state, np.ones(96, np.float32), global_batch=12, **options)


def values(program):
    """Of each worker, one number that all its elements have."""
    for state in states(program):
        assert len({complex(x) for leaf in jax.tree.leaves(state) for x in np.asarray(leaf).reshape(-1)}) == 1
    return np.array([float(state["s"]) for state in states(program)])


@pytest.mark.parametrize("schedule", ["random", PAIRS])
def test_each_worker_gets_the_mean_of_its_schedule(schedule):
    program, expected = program_of(schedule), np.arange(4.0)
    weights_of = schedule_of("neighbor_mean", schedule, 4)
    for step in range(1, 6):
        program.step()
        weights = weights_of.weights(step, range(4))
        expected = np.array(
            [sum(w * expected[j] for j, w in weights[i].items()) if i in weights else expected[i] for i in range(4)]
        )
        np.testing.assert_allclose(values(program), expected, rtol=1e-5)
    assert abs(expected.mean() - 1.5) < 1e-9  # doubly stochastic


def test_a_worker_without_examples_is_in_no_mean():
    program = program_of([[(0, 1), (2, 3)]], shares=(1, 1, 1, 0))
    program.step()
    np.testing.assert_allclose(values(program), [0.5, 0.5, 2.0, 0.0])
