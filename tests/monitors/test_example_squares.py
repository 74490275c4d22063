"""Squared norms per example from the uses of a parameter: each way of computing them against the definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from monitors._example_squares import Chosen, example_squares
from monitors._example_trace import differentiate

RNG = np.random.default_rng(0)


def squares(function, leaf, batch):
    n = len(batch)
    traced = differentiate(lambda leaves, rows: (function(leaves[0], rows[0]), ()), [leaf], [batch], n)
    (found,) = example_squares(traced, [leaf], ["w"], Chosen(n, n))
    return found


@pytest.mark.parametrize(("positions", "width"), [(1, 3), (2, 40), (50, 3)])  # T² (m + n) and T m n in turn
def test_a_dense_layer_with_positions(positions, width):
    batch = RNG.standard_normal((4, positions, width)).astype(np.float32)
    weight = RNG.standard_normal((width, 5)).astype(np.float32)

    def loss(w, x):
        return jnp.tanh(x @ w).sum((1, 2)).mean()

    expected = [jnp.square(jax.grad(loss)(weight, row[None])).sum() for row in batch]
    np.testing.assert_allclose(squares(loss, weight, batch), expected, rtol=1e-5)


def test_a_leaf_that_is_used_twice_has_the_norm_of_the_sum_of_both_uses():
    batch = RNG.standard_normal((4, 3)).astype(np.float32)
    weight = RNG.standard_normal((3, 3)).astype(np.float32)

    def loss(w, x):
        return jnp.tanh(jnp.tanh(x @ w) @ w).sum(1).mean()

    expected = [jnp.square(jax.grad(loss)(weight, row[None])).sum() for row in batch]
    np.testing.assert_allclose(squares(loss, weight, batch), expected, rtol=1e-5)


def test_a_leaf_that_is_not_used_has_norm_zero():
    batch = RNG.standard_normal((4, 3)).astype(np.float32)
    assert squares(lambda w, x: jnp.square(x).sum(1).mean(), np.ones(2, np.float32), batch).tolist() == [0] * 4
