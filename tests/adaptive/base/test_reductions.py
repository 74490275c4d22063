"""Reductions other than sums and extremes, of values that are all on one device."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from adaptive.base.reductions import Mixed, Sliced, adds_up, combine_microbatches

ROWS = [jnp.asarray(r, jnp.float32).reshape(2, 2) for r in ([1, 2, 3, 4], [5, 6, 7, 8], [-3, 0, 0, 9])]


@dataclass(frozen=True)
class Trusting(Sliced):
    """A sum weighted by each worker's number, to which the sum of all slices is added, the step, and the slice."""

    further: bool = False
    adds_up = True

    def sent(self, x, step, worker):
        return (x * (1 + worker)).astype(jnp.float16)

    def statistics(self, rows, first):
        return rows.sum() + 100 * first

    def further_statistics(self, rows, first, statistics):
        return 2 * statistics + int(first) if self.further else None

    def reduced(self, rows, statistics, step, number):
        one, other = statistics if self.further else (statistics, 0)
        return (rows.sum(0) + one + other + step + number).astype(jnp.float16)


@pytest.mark.parametrize("further", [False, True])
def test_a_reduction_by_slices_sees_all_rows_as_they_are_sent(further):
    weighed = sum((1 + n) * np.asarray(row) for n, row in enumerate(ROWS))
    statistic = weighed.sum() + 100
    found = Trusting(further).in_one_place(ROWS, 4)
    assert (found.shape, found.dtype) == ((2, 2), jnp.float32)
    np.testing.assert_array_equal(found, weighed + statistic + further * (2 * statistic + 1) + 4)


class Neighbors(Mixed):
    """Of the members, each with the next one."""

    def weights(self, step, members):
        of = dict(zip(members, [*members[1:], members[0]], strict=True))
        return {a: {b: 1 / (1 + step), a: step / (1 + step)} for a, b in of.items()}


def test_workers_that_are_no_members_keep_their_own_values():
    found = Neighbors().in_one_place(ROWS, 3, (0, 2))
    np.testing.assert_allclose(found[0], 0.75 * ROWS[0] + 0.25 * ROWS[2])
    np.testing.assert_allclose(found[2], 0.75 * ROWS[2] + 0.25 * ROWS[0])
    assert found[1] is ROWS[1]


@pytest.mark.parametrize(
    ("op", "result", "sums"),
    [
        ("sum", 5, True),
        ("max", 3, False),
        ("min", 2, False),
        (Trusting(), 5, True),
        (Sliced(), 2, False),
        (Neighbors(), 2, False),
    ],
)
def test_microbatches_of_one_worker_are_combined_by_kind(op, result, sums):
    assert int(combine_microbatches(op, jnp.int32(2), jnp.int32(3))) == result
    assert adds_up(op) == sums
