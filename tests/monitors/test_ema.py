"""Moving averages of any pytree."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import monitors as mon

from .lockstep import Lockstep, graph, operators, reading


def averaged(values, decay=0.9):
    """What `ema` gives after each of these."""
    program = Lockstep(lambda x: mon.ema(x, decay))
    return [program.step([(v,)], [reading()])[0] for v in values]


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_it_is_the_weighted_mean_of_all_that_was_seen(decay):
    x = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    for t, mean in enumerate(averaged(x, decay)):
        weights = float(decay) ** np.arange(t, -1, -1)
        np.testing.assert_allclose(mean, np.average(x[: t + 1], axis=0, weights=weights), rtol=1e-4, atol=1e-6)


def test_elements_that_are_not_finite_are_skipped_individually():
    nan, inf = np.nan, np.inf
    seen = averaged(np.float32([[nan, 1], [2, nan], [4, -inf], [inf, nan], [nan, 3]]), 0.5)
    np.testing.assert_allclose(seen[0], [nan, 1])
    np.testing.assert_allclose(seen[1], [2, 1])
    np.testing.assert_allclose(seen[2], [5 / 1.5, 1], rtol=1e-6)
    np.testing.assert_array_equal(seen[3], seen[2])
    np.testing.assert_allclose(seen[4], [seen[2][0], 3.5 / 1.5], rtol=1e-6)


def test_it_keeps_structure_shapes_and_dtypes():
    x = {"a": (jnp.ones((2, 1), jnp.bfloat16), jnp.float32(2)), "n": jnp.arange(3), "z": jnp.complex64(1 + 2j)}
    (mean,) = averaged([x])
    assert jax.tree.structure(mean) == jax.tree.structure(x)
    assert jax.tree.map(jnp.shape, mean) == jax.tree.map(jnp.shape, x)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(mean)]
    assert dtypes == [jnp.bfloat16, jnp.float32, jnp.float32, jnp.complex64]
    assert complex(mean["z"]) == 1 + 2j
    assert averaged([{}]) == [{}]


def test_it_is_one_slot_and_no_message():
    assert operators(graph(mon.ema, {"a": jnp.ones(3), "b": 1.0})) == ["state ema"]


def test_outside_a_program_it_is_the_value():
    assert float(mon.ema(3.0)) == 3.0


@pytest.mark.parametrize("decay", [1.0, -0.5])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(ad.CollectiveError, match=rf"ema \(test_ema.py:\d+\): decay={decay}"):
        mon.ema(1.0, decay)
