"""What collectives take and refuse, and how they behave under JAX's transformations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import collectives as comm
from adaptive.base.errors import CollectiveError, DriverError
from adaptive.operators.collectives import collective_p
from adaptive.operators.context import trace_as

HERE = r"\(test_ops.py:\d+\)"


@pytest.fixture
def world():
    with comm.DeviceWorld(jax.local_devices()[:3]) as world:
        yield world


# --- what is refused, and what to write instead -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "op", "message"),
    [
        (np.arange(3), "mean", r"int32, whose mean .*all_reduce\(x, op='sum'\).*x.astype\(jnp.float32\)"),
        (np.array([True]), "mean", r"boolean, which has no mean.*x.astype\(jnp.int32\), op='sum'"),
        (jnp.zeros(3, bool), "max", r"boolean, which has no max.*op='max'"),
        (np.array([1j]), "max", r"complex64, which has no max.*jnp.abs\(z\), op='max'"),
        (jax.random.key(0), "sum", r"a PRNG key.*wrap_key_data\(comm.broadcast\(jax.random.key_data\(key\)\)\)"),
        (np.zeros(3, jax.dtypes.float0), "mean", "the gradient of an integer"),
        ("adam", "mean", "'adam': neither an array nor a number"),
        (2**40, "sum", r"1099511627776: .*too large.*int32|1099511627776: .*int32"),
    ],
)
def test_a_leaf_that_has_no_such_reduction_is_named(value, op, message):
    with pytest.raises(CollectiveError, match=rf"(?s)all_reduce {HERE}: \['a'\]\['b'\]\[1\] is .*{message}"):
        comm.all_reduce({"a": {"b": (1.0 if op == "mean" else 1, value)}}, op=op)


@pytest.mark.parametrize("operator", [comm.all_gather, comm.broadcast])
@pytest.mark.parametrize("value", [jax.random.key(0), "adam", np.zeros(3, jax.dtypes.float0)])
def test_a_leaf_that_cannot_be_sent_is_named(operator, value):
    with pytest.raises(CollectiveError, match=rf"{operator.__name__} {HERE}: \['x'\] is "):
        operator({"x": value})


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (np.ones(3, np.float32), r"float32\[3\]. Sum it over the batch:\n    comm.all_reduce\(x, weight=mask"),
        (np.ones((1,), np.int32), r"int32\[1\]"),
        (True, r"one real number per worker, but is bool\[\]"),
        (1j, r"one real number per worker, but is complex64\[\]"),
        ("many", "weight='many' is not a number"),
        (-1, "weight=-1 must be finite and not negative"),
        (float("nan"), "weight=nan must be finite"),
    ],
)
def test_a_weight_that_is_none_is_refused(weight, message):
    with pytest.raises(CollectiveError, match=message):
        comm.all_reduce(1.0, weight=weight)


@pytest.mark.parametrize(("root", "message"), [(-1, "numbered from 0"), (1.5, "must be an integer"), ("0", "integer")])
def test_a_root_is_the_number_of_a_worker(root, message):
    with pytest.raises(CollectiveError, match=message):
        comm.broadcast(1.0, root=root)


def test_a_root_beyond_the_workers_is_refused_as_soon_as_they_are_known(world):
    with pytest.raises(CollectiveError, match="no worker root=3: the workers are 0 to 2"):
        comm.broadcast(1.0, root=3)
    with trace_as(capacity=5, examples=1):  # of a program: what counts there is its world
        jax.make_jaxpr(lambda x: comm.broadcast(x, root=4))(1.0)
        with pytest.raises(CollectiveError, match="no worker root=5: the workers are 0 to 4"):
            jax.make_jaxpr(lambda x: comm.broadcast(x, root=5))(1.0)


# --- what is taken ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [{}, [], None, {"a": None, "b": ()}])
def test_a_tree_without_leaves_passes_through(tree, world):
    assert comm.all_reduce(tree) == tree  # not even a weight is asked for
    assert comm.all_gather(tree) == tree
    assert comm.broadcast(tree) == tree


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "complex64"])
def test_results_have_the_dtypes_of_their_leaves(world, dtype):
    x = jnp.asarray([1, 2], dtype)
    assert comm.all_reduce(x, op="sum").dtype == dtype
    assert comm.all_gather(x).dtype == dtype
    assert comm.broadcast(x).dtype == dtype
    if jnp.issubdtype(dtype, jnp.floating):
        assert comm.all_reduce(x, weight=3).dtype == dtype


def test_without_a_world_there_is_one_worker():
    x = jnp.arange(3.0)
    for op in ("mean", "sum", "max", "min"):
        np.testing.assert_array_equal(comm.all_reduce(x, op=op), x)
    np.testing.assert_array_equal(comm.all_gather(x), x[None])
    np.testing.assert_array_equal(comm.broadcast(x), x)


# --- in a trace -------------------------------------------------------------------------------------------------------


def collectives_in(function, *args, workers=4):
    with trace_as(workers, examples=8):
        jaxpr = jax.make_jaxpr(function)(*args)
    return [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive is collective_p], jaxpr.out_avals


def test_a_tree_is_one_equation_that_knows_its_leaves_by_path():
    grads = {"dense": {"bias": jnp.zeros(3), "kernel": jnp.zeros((2, 3))}, "scale": jnp.zeros((), jnp.bfloat16)}
    (eqn,), avals = collectives_in(comm.all_reduce, grads)
    assert eqn.params["names"] == ("['dense']['bias']", "['dense']['kernel']", "['scale']")
    assert (eqn.params["how"].about, eqn.params["capacity"]) == ("all_reduce(op='mean')", 4)
    assert [str(a) for a in avals] == ["float32[3]", "float32[2,3]", "bfloat16[]"]
    assert [str(v.aval) for v in eqn.invars] == ["float32[3]", "float32[2,3]", "bfloat16[]", "float32[]"]


def test_a_gather_has_a_row_per_worker_of_the_program():
    (eqn,), avals = collectives_in(lambda x: comm.all_gather(x), jnp.zeros((2, 3), jnp.int8))
    assert eqn.params["how"].name == "all_gather"
    assert [str(a) for a in avals] == ["int8[4,2,3]"]


def test_refusals_name_the_line_in_a_trace_too():
    with pytest.raises(DriverError, match=rf"all_reduce {HERE}: the value is int32"):
        collectives_in(jax.jit(lambda x: comm.all_reduce(x)), jnp.arange(3))


# --- under transformations --------------------------------------------------------------------------------------------


def test_forward_derivatives_are_reduced_as_values_are(world):
    def f(x):
        return comm.all_reduce(jnp.sin(x), weight=2.0), comm.all_reduce(x * x, op="sum")

    x, v = jnp.array([0.3, 0.7]), jnp.array([1.0, -2.0])
    (mean, total), (d_mean, d_total) = jax.jvp(f, (x,), (v,))
    np.testing.assert_allclose(mean, np.sin(x), rtol=1e-6)
    np.testing.assert_allclose(total, 3 * x * x, rtol=1e-6)
    np.testing.assert_allclose(d_mean, np.cos(x) * v, rtol=1e-6)
    np.testing.assert_allclose(d_total, 3 * 2 * x * v, rtol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: comm.all_reduce(x, weight=1.0).sum(),
        lambda x: comm.all_gather(x).sum(),
        lambda x: comm.broadcast(x).sum(),
    ],
)
def test_reverse_derivatives_are_refused(world, function):
    with pytest.raises(CollectiveError, match=r"(?s)Differentiate the local loss, then reduce:.*all_reduce\(grads\)"):
        jax.grad(function)(jnp.ones(2))


@pytest.mark.parametrize("op", ["max", "min"])
def test_derivatives_of_extremes_are_refused(world, op):
    with pytest.raises(CollectiveError, match=rf"all_reduce\(op='{op}'\) cannot be differentiated {HERE}"):
        jax.jvp(lambda x: comm.all_reduce(x, op=op), (1.0,), (1.0,))


def test_derivatives_of_a_weight_are_refused(world):
    with pytest.raises(CollectiveError, match=rf"with respect to its weight {HERE}"):
        jax.jvp(lambda w: comm.all_reduce(2.0, weight=w), (1.0,), (1.0,))


def test_vmap_maps_values_and_not_weights(world):
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(jax.vmap(lambda row: comm.all_reduce(row, op="sum"))(x), 3 * x)
    np.testing.assert_array_equal(jax.vmap(lambda row: comm.all_reduce(row, weight=4.0), in_axes=1, out_axes=1)(x), x)
    gathered = jax.vmap(comm.all_gather)(x)
    assert gathered.shape == (2, 3, 3)
    np.testing.assert_array_equal(gathered, np.broadcast_to(x[:, None], (2, 3, 3)))
    with pytest.raises(CollectiveError, match="weight= must be one scalar per worker, not mapped by vmap"):
        jax.vmap(lambda row: comm.all_reduce(row, weight=row.sum()))(x)
