"""What users give as data: taken for what it is, or refused with what to write."""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import adaptive as ad
from adaptive.data.examples import Examples

COVERS = ("adaptive/data/lists_of_examples.py",)

X, Y = np.arange(12, dtype=np.float32).reshape(4, 3), np.arange(4, dtype=np.int32)


class Pair(NamedTuple):
    x: Any
    y: Any


@flax.struct.dataclass
class Both:
    """A pytree of arrays that can be indexed, too: by rows, or by `odd`."""

    x: Any
    odd: Any = flax.struct.field(pytree_node=False, default=None)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.odd if self.odd is not None else Both(self.x[index])


class Shifted(Both):
    """A pytree of arrays whose rows are built like the arrays', and are others from row `first` on."""

    first = 0

    def __getitem__(self, index):
        return type(self)(self.x[index] + (index >= self.first))


class ShiftedAtTheEnd(Shifted):
    first = 3


class Longer(Both):
    """A pytree of arrays, and a source of more examples than they have rows."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return Both(X[index % 4] + index)


jax.tree_util.register_pytree_node(Shifted, lambda s: ((s.x,), None), lambda _, x: Shifted(*x))
jax.tree_util.register_pytree_node(ShiftedAtTheEnd, lambda s: ((s.x,), None), lambda _, x: ShiftedAtTheEnd(*x))
jax.tree_util.register_pytree_node(Longer, lambda s: ((s.x,), None), lambda _, x: Longer(*x))


class Frame:
    """As pandas has it: an array with more around it."""

    shape = (4, 3)

    def __array__(self, dtype=None, copy=None):
        return X.astype(dtype or np.float64)

    def __len__(self):
        return 4

    def __getitem__(self, column):
        raise KeyError(column)


class Table:
    """As datasets of Hugging Face have it: rows that have a shape together, and are no array."""

    shape = (4, 2)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"x": X[index], "y": int(Y[index])}


def same(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(jax.tree.map(np.array_equal, a, b))


# --- containers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "row"),
    [
        (flax.core.FrozenDict(x=X, y=Y), flax.core.FrozenDict(x=X[1], y=Y[1])),
        (Pair(X, Y), Pair(X[1], Y[1])),
        ((Y, Y), (Y[1], Y[1])),
        ([X, Y], [X[1], Y[1]]),
        ({"x": X, "nothing": {}, "none": None}, {"x": X[1], "nothing": {}, "none": None}),
        ([{"x": X[i], "y": 3 * i} for i in range(4)], {"x": X[1], "y": 3}),
        ([{"x": X[i]} for i in range(4)], {"x": X[1]}),
        (
            [{"x": [1, 2], "y": {"z": [[3.5]]}}, {"x": [3, 4], "y": {"z": [[4.5]]}}],
            {"x": np.array([3, 4]), "y": {"z": np.array([[4.5]])}},
        ),
        ([Pair(X[i], Y[i]) for i in range(4)], Pair(X[1], Y[1])),
        ([(0.5, 1), (1.5, 2)], (1.5, 2)),
        ([1.5, 2.5, 3], 2.5),
        (Both(X), Both(X[1])),
        (Longer(X), Both(X[1] + 1)),
        (Frame(), X[1]),
        (Table(), {"x": X[1], "y": Y[1]}),
    ],
)
def test_kinds_of_data_sets_are_recognized(data, row):
    examples = Examples(data)
    assert same(jax.tree.map(lambda a: a[0], examples.rows(np.array([1]))), row)
    assert examples.in_memory == (not isinstance(data, Table | Longer))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([(X[0],), (X[1],)], "list of 2 of tuple of one structure, whose arrays have a common"),
        ([(X[0],), (X[1],)], "jax.tree.map(lambda *xs: np.stack(xs), *data)     2 examples"),
        ([(X[0],), (X[1],)], "tuple(data)                                       arrays of 3 examples each"),
        ([X, X], "ad.Shards(data)                                   4 examples for each of 2 workers"),
        ([[1.0, 2.0], [3.0, 4.0]], "data[0] is [1.0, 2.0]: data may be a list of 2 examples, or of 2 columns"),
        ([{"x": X[0], "name": "a"}, {"x": X[1], "name": "b"}], "data[0]['name'] holds text"),
        ([{"x": [1, 2]}, {"x": [1, [2]]}], "data[1]['x'] is a list of lists of different lengths. Examples must have"),
        ({"x": [[1, 2], [3, 4]], "y": Y}, "Make an array of it:  np.asarray(x)"),
        (
            [{"x": X[0], "y": 1}, {"x": X[0, :2], "y": 1}],
            "example['x'] of example 1 has shape (2,), of example 0 (3,). Examples must have the same shapes",
        ),
        (({"x": X[0], "y": 1}, {"x": X[1], "y": 1}), "If these are examples, stack them"),
        (types.MappingProxyType({"x": X}), "a mappingproxy, which JAX takes for a single leaf. Pass dict(data)"),
        (Shifted(X), "a Shifted, a pytree of arrays and a source at once, and its data[0] is not"),
        (ShiftedAtTheEnd(X), "a ShiftedAtTheEnd, a pytree of arrays and a source at once, and its data[3] is not"),
        (Both(X, odd={"first": 1}), "a Both, a pytree of arrays and a source at once, and its data["),
    ],
)
def test_ambiguous_data_is_refused_with_what_to_write(data, says):
    with pytest.raises(ad.DataError) as error:
        Examples(data)
    assert says in str(error.value)


def test_the_suggested_code_works():
    samples = [(X[0],), (X[1],)]
    assert len(Examples(jax.tree.map(lambda *xs: np.stack(xs), *samples))) == 2
    assert len(Examples(tuple(samples))) == 3
    assert ad.Shards(samples).shard_ranges[1] == (3, 3)


def test_a_long_list_of_ragged_examples_makes_a_short_error():
    with pytest.raises(ad.DataError) as error:
        Examples([{"x": np.zeros(5 + i % 2)} for i in range(1000)])
    assert len(str(error.value)) < 600


# --- leaves -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["float16", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "complex64", "bool", "uint8"]
)
def test_every_numeric_dtype_is_preserved(dtype):
    for array in (X.astype(dtype), jnp.asarray(X.astype(dtype))):
        examples = Examples(array)
        assert examples.example.dtype == dtype
        assert np.array_equal(examples.rows(np.array([2])), X[2:3].astype(dtype))


def test_arrays_of_another_device_are_taken_to_the_host():
    examples = Examples({"x": jax.device_put(X, jax.devices()[-1])})
    assert isinstance(examples.rows(np.array([0]))["x"], np.ndarray)


@pytest.mark.parametrize(
    ("leaf", "says"),
    [
        (jax.random.split(jax.random.key(0), 4), "data['x'] holds PRNG keys. Pass their data"),
        (np.zeros(4, [("a", "f4"), ("b", "i4")]), "is a structured array. Pass its fields:  {name: x[name]"),
        (np.zeros(4, "V8"), "data['x'] holds elements of |V8"),
        (np.ma.array(X, mask=X > 3), "data['x'][1, 1] is masked, and the mask would be lost"),
        (np.array([1, 2, 2**40, 3]), "data['x'][2] holds 1099511627776, which int32 cannot"),
        (np.array([0, 2**32], np.uint64), "data['x'][1] holds 4294967296, which uint32 cannot"),
        (b"four", "data['x'] holds bytes"),
    ],
)
def test_a_leaf_of_which_something_would_be_lost_is_refused(leaf, says):
    with pytest.raises(ad.DataError) as error:
        Examples({"x": leaf})
    assert says in str(error.value)


def test_wide_integers_that_fit_and_wide_integers_under_x64_are_taken():
    assert Examples(np.array([-(2**31), 2**31 - 1])).example == -(2**31)
    with jax.enable_x64(True):
        assert Examples(np.array([2**40])).example == 2**40


def test_rows_of_a_source_keep_their_dtypes_and_their_values():
    def source(*rows):
        return type("Source", (), {"__len__": lambda _: len(rows), "__getitem__": lambda _, i: {"x": rows[i]}})()

    with pytest.raises(ad.DataError, match=r"example\['x'\] of example 1 is float32, of example 0 int32"):
        Examples(source(1, 0.5)).rows(np.arange(2))
    with pytest.raises(ad.DataError, match=r"data\[1\]\['x'\] holds 1099511627776, which int32 cannot"):
        Examples(source(1, 2**40)).rows(np.arange(2))
