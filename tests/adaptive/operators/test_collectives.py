"""What JAX's transformations make of collectives."""

from __future__ import annotations

import jax
import pytest

import adaptive as ad
import collectives as comm
from tests.adaptive.drivers import traced


@pytest.mark.parametrize("op", ["max", "min"])
def test_extremes_have_no_derivative(op):
    with pytest.raises(ad.CollectiveError, match=f"op='{op}'"):
        traced(lambda s, b: (s + jax.grad(lambda w: comm.all_reduce(w * b["y"].mean(), op=op))(s), {}), 0.0)


def test_a_moving_weight_has_no_derivative():
    with pytest.raises(ad.CollectiveError, match="with respect to its weight"):
        traced(lambda s, b: (s + jax.grad(lambda w: comm.all_reduce(b["y"].mean(), weight=w))(s), {}), 0.0)


def test_a_mapped_weight_is_refused():
    def driver(state, batch):
        return state + jax.vmap(lambda y: comm.all_reduce(y, weight=y))(batch["y"]).sum(), {}

    with pytest.raises(ad.CollectiveError, match="one scalar per worker, not mapped"):
        traced(driver, 0.0)
