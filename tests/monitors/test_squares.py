"""Squared norms: precision, dtypes, and gradients that do not belong together."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive import CollectiveError
from monitors._squares import check_alike, squared_norm


def test_all_leaves_count():
    tree = {"w": jnp.array([[1.0, -2.0], [3.0, 0.0]]), "b": [jnp.array(4.0), jnp.zeros(0)]}
    assert float(squared_norm(tree)) == 30.0
    assert float(squared_norm({})) == 0.0


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_is_squared_in_single(dtype):
    x = jnp.full(3, 300.0, dtype)  # its square is beyond float16
    norm = squared_norm(x)
    assert norm.dtype == jnp.float32
    assert float(norm) == 3 * float(x[0]) ** 2


def test_double_stays_double_and_complex_counts_both_parts():
    with jax.enable_x64(True):
        assert squared_norm([jnp.ones(2, jnp.float64), jnp.ones(2, jnp.float32)]).dtype == jnp.float64
    z = squared_norm(jnp.array([3 + 4j, 1j], jnp.complex64))
    assert z.dtype == jnp.float32
    assert float(z) == pytest.approx(26.0)


@pytest.mark.parametrize(("shape", "averaged"), [(4_000_000, False), ((2000, 2000), True)])
def test_rounding_does_not_grow_with_the_number_of_parameters(shape, averaged):
    x = np.full(shape, 0.1, np.float32)  # a running sum in float32 is off by 1e-3 here
    running = np.cumsum(np.square(x), dtype=np.float32)[-1]
    exact = np.square(x.astype(np.float64)).sum()
    assert abs(running / exact - 1) > 1e-4
    assert abs(float(jax.jit(partial(squared_norm, averaged=averaged))(x)) / exact - 1) < 1e-6


def test_gradients_of_different_models_are_refused_with_the_leaf():
    grads = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    check_alike("noise_scale", grads, {"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)})
    with pytest.raises(
        CollectiveError, match=r"noise_scale \(test_squares.py:\d+\).*grads\['w'\] is \(2, 3\).*\(3, 2\)"
    ):
        check_alike("noise_scale", grads, {"w": jnp.ones((3, 2)), "b": jnp.ones(3)})
    with pytest.raises(CollectiveError, match=r"avg_grads\['b'\] is missing"):
        check_alike("gradient_variance", grads, {"w": jnp.ones((2, 3))})
    with pytest.raises(CollectiveError, match=r"grads\['c'\] is missing"):
        check_alike("gradient_variance", grads, {**grads, "c": jnp.ones(1)})
