"""Two-byte formats: which of the two nearest numbers a value is rounded to."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collectives.compression._wire import Narrow

N = 4000
STOCHASTIC = Narrow("bfloat16", stochastic=True)


@cache
def compiled(how):
    return jax.jit(how.sent), jax.jit(lambda rows: how.reduced(rows, None, np.int32(1), np.int32(0)))


def rounded(how, values, step=1, worker=0):
    """Return at most N values as they are sent."""
    sent = compiled(how)[0](np.resize(np.float32(values), N), np.int32(step), np.int32(worker))
    assert sent.dtype == how.wire_dtype(np.dtype(np.float32)) == jnp.dtype(how.format)
    return np.asarray(sent).astype(np.float64)


def test_stochastic_rounding_is_to_both_neighbors_by_their_distance():
    for below, above, share in [
        (1.0, 1.0078125, 0.25),
        (-3.015625, -3.0, 0.9),
        (2.0**-100, 2.0**-100 * 1.0078125, 0.5),
    ]:
        found = rounded(STOCHASTIC, below + share * (above - below))
        assert {*found} == {below, above}
        assert abs(np.mean(found == above) - share) < 5 * np.sqrt(share * (1 - share) / N)
        assert {*rounded(STOCHASTIC, below)} == {below}  # as it is


def test_stochastic_rounding_differs_between_steps_workers_and_ways_and_is_repeatable():
    values = np.linspace(1, 2, N)
    found = [rounded(STOCHASTIC, values, step, worker) for step in (1, 2) for worker in (0, 1, -1)]
    found.append(np.asarray(compiled(STOCHASTIC)[1](np.float32(values)[None])).astype(np.float64))
    assert len({row.tobytes() for row in found}) == len(found)
    np.testing.assert_array_equal(rounded(STOCHASTIC, values), found[0])


@pytest.mark.parametrize("how", [Narrow("bfloat16"), STOCHASTIC, Narrow("float16")])
def test_what_is_not_finite_stays_and_sums_are_in_single_precision(how):
    np.testing.assert_array_equal(rounded(how, [np.inf, -np.inf, np.nan, 0])[:4], [np.inf, -np.inf, np.nan, 0])
    rows = np.float32([[256, 1], [1, 2], [1, 3]]).astype(how.format)
    np.testing.assert_array_equal(np.asarray(compiled(how)[1](rows)).astype(float), [258, 6])


def test_the_nearest_number_is_taken_otherwise():
    np.testing.assert_array_equal(rounded(Narrow("bfloat16"), [1.003, 1.005, -1.005])[:3], [1, 1.0078125, -1.0078125])
