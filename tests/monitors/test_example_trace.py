"""A loss differentiated by its parameters and by the result of each use of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from monitors._example_trace import MixedExamples, differentiate

LEAVES = [np.float32([[1.0, -2.0], [0.5, 3.0]])]
BATCH = [np.float32([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])]


def loss(leaves, batch):
    return jnp.square(batch[0] @ leaves[0]).mean(), batch[0].shape


def test_a_product_of_rows_and_a_weight_is_one_use_with_its_derivative():
    traced = differentiate(lambda leaves, batch: (loss(leaves, batch)[0], ()), LEAVES, BATCH, 3)
    (use,) = traced.uses
    assert use.eqn.primitive.name == "dot_general"
    assert use.axis == 0
    results = BATCH[0] @ LEAVES[0]
    np.testing.assert_allclose(traced.derivatives[0], 2 * results / results.size, rtol=1e-6)
    expected = jax.grad(lambda leaves: loss(leaves, BATCH)[0])(LEAVES)
    np.testing.assert_allclose(traced.grads[0], expected[0], rtol=1e-6)


def test_a_loss_that_joins_examples_is_refused():
    def centered(leaves, batch):
        x = batch[0] @ leaves[0]
        return jnp.square(x - x.mean(axis=0, keepdims=True)).mean(), ()

    with pytest.raises(MixedExamples):
        differentiate(centered, LEAVES, BATCH, 3)
