"""Which objects count as numbers."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive.base.values.numbers import real, reals, whole

NONE = [
    "64",
    b"64",
    np.str_("64"),
    np.bytes_(b"64"),
    np.array("64"),
    True,
    np.True_,
    jnp.array(True),
    None,
    1j,
    [64],
    {},
]


@pytest.mark.parametrize(
    "value",
    [
        *(64, 64.0, np.int8(64), np.uint64(64), np.float32(64), np.array(64), jnp.int32(64), jnp.bfloat16(64)),
        *(Fraction(128, 2), Decimal(64)),
    ],
)
def test_numbers_of_any_kind_are_taken(value):
    assert (whole(value), type(whole(value)), real(value)) == (64, int, 64.0)


@pytest.mark.parametrize("value", NONE, ids=repr)
def test_booleans_and_text_are_not_numbers(value):
    assert whole(value) is None
    assert real(value) is None


def test_integers_keep_every_digit_and_floats_may_be_without_bound():
    assert whole(10**400) == 10**400
    assert whole(np.int64(2**62 + 1)) == 2**62 + 1
    assert (real(10**400), real(-(10**400))) == (math.inf, -math.inf)
    assert [whole(v) for v in (math.nan, math.inf, 2.5, Fraction(1, 2))] == [None] * 4


def test_sequences_and_arrays_of_numbers():
    for values in ([1, 2.5], (np.int8(1), Fraction(5, 2)), np.array([1, 2.5], np.float16), jnp.array([1, 2.5])):
        np.testing.assert_array_equal(reals(values), [1.0, 2.5])
    np.testing.assert_array_equal(reals([10**400, 1]), [math.inf, 1.0])
    for wrong in (
        ["1", "2"],
        [1, "2"],
        [1, None],
        [True, False],
        [1j, 2],
        [[1], [1, 2]],
        {"a": 1},
        "12",
        jax.random.key(0),
    ):
        assert reals(wrong) is None


def test_a_number_that_is_not_known_yet_is_none():
    seen = []
    jax.make_jaxpr(lambda x: seen.extend([whole(x), real(x), reals(x)]))(3)
    assert seen == [None, None, None]
