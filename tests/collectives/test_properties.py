"""Any pytree of any arrays is reduced as each of its leaves is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import collectives as comm

COVERS = ("collectives/_reduce.py",)

FLOATS = ["float32", "float16", "bfloat16"]
INTEGERS = ["int32", "uint8", "int16"]


def arrays(dtypes):
    """Small integers as any dtype: their sums and means are exact, so worlds cannot differ by rounding."""
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=4)
    values = hnp.arrays(np.int8, shapes, elements=st.integers(0, 8))
    return st.builds(lambda x, dtype: x.astype(jnp.dtype(dtype)), values, st.sampled_from(dtypes))


def trees(leaves):
    return st.recursive(
        leaves | st.none(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        ),
        max_leaves=6,
    )


@pytest.fixture(params=[1, 2], scope="module")
def world(request):
    make = comm.SoloWorld if request.param == 1 else lambda: comm.DeviceWorld(jax.local_devices()[:2])
    with make() as world:
        yield world


def check(found, tree, expected):
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for result, leaf in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert isinstance(result, jax.Array)
        wanted = expected(leaf)
        assert (result.dtype, result.shape) == (leaf.dtype, wanted.shape)
        np.testing.assert_array_equal(result, wanted)


# The world is the same for all examples, and means to be; the first example compiles.
suite = settings(max_examples=15, deadline=None, derandomize=True, database=None)


@suite
@given(tree=trees(arrays(FLOATS)), weight=st.sampled_from([1, 4.0, 16]))
def test_means_of_any_tree_are_exact(world, tree, weight):
    check(comm.all_reduce(tree, weight=weight), tree, lambda x: x)


@suite
@given(tree=trees(arrays(FLOATS + INTEGERS)), op=st.sampled_from(["sum", "max", "min"]))
def test_sums_and_extremes_of_any_tree(world, tree, op):
    times = world.size if op == "sum" else 1
    check(comm.all_reduce(tree, op=op), tree, lambda x: (x.astype(np.float32) * times).astype(x.dtype))


@suite
@given(tree=trees(arrays([*FLOATS, *INTEGERS, "bool"])), root=st.integers(0, 1))
def test_gathers_and_broadcasts_of_any_tree(world, tree, root):
    check(comm.all_gather(tree), tree, lambda x: np.broadcast_to(x, (world.size, *x.shape)))
    check(comm.broadcast(tree, root=min(root, world.size - 1)), tree, lambda x: x)
