"""What a driver closes over lies on each device once."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive.runtime.kernels import Kernels
from adaptive.runtime.kernels.constants import Constants
from adaptive.runtime.placement import Placement
from adaptive.runtime.segment import SegmentFunction

TABLES = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.arange(6, dtype=np.float32).reshape(2, 3).T,  # not contiguous
    np.array(True),
    np.zeros((0, 3), np.float32),
    jnp.arange(3, dtype=jnp.bfloat16),
]


@pytest.mark.parametrize("table", TABLES, ids=lambda t: f"{t.dtype}{t.shape}")
def test_equal_arrays_share_a_copy_on_a_device(table):
    constants, (first, second) = Constants(), jax.local_devices()[:2]
    copy = constants.on(first, table)
    assert copy.devices() == {first}
    assert (copy.dtype, copy.shape) == (table.dtype, table.shape)
    assert np.array_equal(copy, table)
    assert constants.on(first, np.array(table)) is constants.on(first, jnp.asarray(table)) is copy
    assert constants.on(second, table).devices() == {second}


def test_arrays_that_differ_in_anything_are_not_shared():
    constants, device = Constants(), jax.local_devices()[0]
    zeros = np.zeros(4, np.float32)
    arrays = [zeros, zeros.reshape(2, 2), zeros.astype(np.int32), zeros + 1]
    copies = [constants.on(device, a) for a in arrays]
    assert len({id(c) for c in copies}) == len(arrays)
    assert [c.dtype for c in copies] == [a.dtype for a in arrays]


def test_keys_are_constants_too():
    constants, device = Constants(), jax.local_devices()[0]
    copy = constants.on(device, jax.random.key(1))
    assert constants.on(device, jax.random.key(1)) is copy
    assert constants.on(device, jax.random.key(2)) is not copy
    assert jax.random.key_data(copy).tolist() == jax.random.key_data(jax.random.key(1)).tolist()


def test_later_writes_to_a_users_array_are_not_seen():
    table = np.zeros(1 << 12, np.float32)
    copy = Constants().on(jax.local_devices()[0], table)
    table[:] = 1
    assert not np.asarray(copy).any()


def test_an_array_that_no_program_has_is_let_go():
    constants, device = Constants(), jax.local_devices()[0]
    copy = weakref.ref(constants.on(device, np.zeros(4, np.float32)))
    gc.collect()
    assert copy() is None


def test_kernels_of_all_sizes_share_closed_over_arrays():
    def trace(size):
        shapes = jax.ShapeDtypeStruct((size,), jnp.float32), jax.ShapeDtypeStruct((9,), "f4")
        table = np.arange(9, dtype=np.float32)  # another object in each trace
        addresses = ("batch", 0, 0), ("const", 0, 0)
        results = {"results": (("part", 0, 0),), "result_shapes": ((9,),), "consts": {addresses[1]: table}}
        return {0: SegmentFunction(lambda batch, const: [batch.sum() + const], addresses, shapes, **results)}

    devices = jax.local_devices()[:2]
    kernels = Kernels(trace, list(map(Placement, devices)), splittable=True)
    kernels.require_microbatches([(2, 3), (3,)])
    tables = [kernels.kernel(local, size, 0).call.consts["const", 0, 0] for local, size in ((0, 2), (0, 3), (1, 3))]
    assert tables[0] is tables[1]
    assert tables[2].devices() == {devices[1]}
