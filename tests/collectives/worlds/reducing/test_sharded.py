"""The program that reduces parts on devices."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from collectives.worlds.reducing.sharded import Sharded


@pytest.mark.parametrize("op", ["sum", "max"])
def test_parts_of_no_elements_are_not_communicated(op):
    """With JAX 0.11.2, XLA's compiler crashes where one program has all-reduces with and without elements."""
    devices = jax.local_devices()[:2]
    sharded = Sharded(devices, devices)
    rows = [[jax.device_put(np.ones(n, np.int32), device) for n in (0, 3)] for device in devices]
    joined = sharded.join(rows, [op, op])
    program = sharded._reduce.lower(joined.arrays, joined.by_step, ops=joined.ops, scalar=joined.scalar).as_text()
    assert program.count("stablehlo.all_reduce") == 1
    empty, full = sharded.reduce(joined)
    assert (empty.shape, empty.dtype) == ((0,), np.int32)
    assert full.tolist() == [2 if op == "sum" else 1] * 3
