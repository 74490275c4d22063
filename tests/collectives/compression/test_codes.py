"""Codes of a few bits, against plain numpy."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collectives.compression._wire import NAMED, pack, unpack


class Compiled(NamedTuple):
    """What a codec does, each function as one program: operation by operation, dozens are compiled."""

    encode: Any
    there_and_back: Any


@cache
def compiled(codec):
    there_and_back = jax.jit(lambda x, key=None: codec.decode(codec.encode(x, key), x.dtype))
    return Compiled(jax.jit(codec.encode), there_and_back)


def uniform(x, bits):
    """The nearest of 2^bits - 1 evenly spaced numbers between the greatest magnitude and its negative."""
    levels = 2 ** (bits - 1) - 1
    step = (np.abs(x).max(1, keepdims=True) / levels).astype(np.float32)
    return np.round(x / np.where(step > 0, step, 1).astype(x.dtype)) * step.astype(x.dtype)


def two_bits(x):
    """Two magnitudes of either sign in the proportion of 0.4528 to 1.5104, with the factor of least squares."""
    spread = np.sqrt((x * x).mean(1, keepdims=True))
    values = np.where(x < 0, -1, 1) * np.where(np.abs(x) > 0.9816 * spread, 1.5104, 0.4528)
    factor = ((x * values).sum(1, keepdims=True) / (values * values).sum(1, keepdims=True)).astype(np.float32)
    return values * factor.astype(x.dtype)


REFERENCES = {
    "8bit": lambda x: uniform(x, 8),
    "4bit": lambda x: uniform(x, 4),
    "2bit": two_bits,
}


def numbers(codec, rows=5, seed=0):
    """Rows of very different sizes, as a model's layers have."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, codec.block)) * 10.0 ** np.arange(-3, rows - 3)[:, None]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_packed_integers_round_trip(bits):
    given = np.random.default_rng(bits).integers(0, 2**bits, (3, 37))
    packed = pack(jnp.asarray(given), bits)
    assert packed.dtype == jnp.uint8
    assert packed.shape == (3, -(-37 * bits // 8))
    np.testing.assert_array_equal(unpack(packed, bits, 37), given)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("name", NAMED)
def test_values_are_those_of_the_plain_formula(name):
    codec = NAMED[name]
    x = numbers(codec)
    found = compiled(codec).there_and_back(jnp.asarray(x))
    np.testing.assert_allclose(found, REFERENCES[name](x), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", NAMED)
def test_rows_are_as_long_as_they_say_and_carry_a_weight(name):
    codec = NAMED[name]
    coded = compiled(codec).encode(jnp.asarray(numbers(codec), np.float32))
    rows = codec.to_rows(coded, 0.25)
    assert rows.dtype == jnp.uint8
    assert rows.shape == (5, codec.row_bytes)
    np.testing.assert_array_equal(codec.decode(codec.of_rows(rows)), 0.25 * codec.decode(coded))


@pytest.mark.parametrize("name", NAMED)
def test_zeros_stay_zeros(name):
    codec = NAMED[name]
    zeros = jnp.zeros((2, codec.block))
    np.testing.assert_array_equal(compiled(codec).there_and_back(zeros), zeros)
    np.testing.assert_array_equal(compiled(codec).there_and_back(zeros, jax.random.key(0)), zeros)


@pytest.mark.parametrize("name", NAMED)
def test_neither_large_nor_small_numbers_overflow(name):
    codec = NAMED[name]
    x = numbers(codec, rows=1)
    plain = compiled(codec).there_and_back(jnp.asarray(x, np.float32))
    for scale in (1e-30, 1e30):
        found = compiled(codec).there_and_back(jnp.asarray(x * scale, np.float32))
        np.testing.assert_allclose(found / np.float32(scale), plain, rtol=1e-4)


@pytest.mark.parametrize("name", NAMED)
def test_stochastic_rounding_is_right_on_average(name):
    codec = NAMED[name].fitted(64)
    x = jnp.asarray(np.linspace(-1, 1, 64)[None])
    keys = jax.random.split(jax.random.key(0), 4000)
    found = jax.jit(jax.vmap(lambda key: codec.decode(codec.encode(x, key))))(keys)
    inside = np.abs(x[0]) < 1.5 * np.sqrt(np.mean(x**2))  # two bits end at 1.51 of the root mean square
    spread = np.asarray(found).std(0)[0] / np.sqrt(len(keys))
    assert inside.sum() > 50
    assert (np.abs(found.mean(0) - x)[0] <= 5 * spread + 1e-6)[inside].all()
