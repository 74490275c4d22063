"""The rule: the fewest microbatches of compiled sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive.runtime.kernels.microbatches import by_size_alone, fewest, largest_in_cache, missing_buckets

POWERS = [1 << i for i in range(8)]


@pytest.mark.parametrize(
    ("size", "compiled", "microbatches"),
    [
        (128, POWERS, (128,)),
        (255, POWERS, (128, 64, 32, 16, 8, 4, 2, 1)),
        (300, POWERS, (128, 128, 32, 8, 4)),
        (300, [*POWERS, 300], (300,)),  # its own kernel
        (77, [*POWERS, 70], (64, 8, 4, 1)),  # 70 and 7, which has no kernel
        (41, [*POWERS, 40], (40, 1)),
        (80, [*POWERS, 40], (64, 16)),  # of equally many, powers of two
        (120, [40], (40, 40, 40)),
        (9, [5, 4], (5, 4)),
        (7, [40], None),
        (41, [40, 32], None),
    ],
)
def test_a_batch_runs_as_the_fewest_microbatches(size, compiled, microbatches):
    assert fewest(size, compiled) == microbatches


@given(st.integers(1, 500), st.sets(st.integers(1, 300), max_size=6), st.integers(1, 3))
def test_with_a_kernel_of_one_example_every_size_is_made(size, others, at_least):
    compiled = {1, *others}
    found = fewest(size, compiled, at_least)
    assert sum(found) == size
    assert set(found) <= compiled
    assert len(found) >= min(size, at_least)
    assert len(found) <= size


@pytest.mark.parametrize(
    ("size", "at_least", "largest", "resizable", "microbatches"),
    [
        (40, 1, None, True, (32, 8)),
        (40, 2, None, True, (16, 16, 8)),
        (40, 1, 16, True, (16, 16, 8)),
        (40, 1, None, False, (40,)),
        (40, 1, 16, False, (16, 16, 8)),
        (40, 3, None, False, (14, 14, 12)),
        (1, 2, None, True, (1,)),
    ],
)
def test_by_size_alone(size, at_least, largest, resizable, microbatches):
    assert by_size_alone(size, at_least, largest, resizable=resizable) == microbatches


def test_missing_buckets_are_those_up_to_the_largest_microbatch():
    assert missing_buckets(40, None, {8}) == [32, 16, 4, 2, 1]
    assert missing_buckets(40, 20, ()) == [16, 8, 4, 2, 1]


def test_temporaries_fit_the_cache_unless_the_gradient_is_large():
    mib = 1 << 20
    assert largest_in_cache(64, 4 * mib, 0) == 128
    assert largest_in_cache(1024, 76 * mib, 0) == 64
    assert largest_in_cache(1024, 76 * mib, 30 * mib) == 1024
    assert largest_in_cache(1, 900 * mib, 0) == 1
    assert largest_in_cache(8, 0, 0) >= 1 << 20
