"""The order of an epoch: a permutation, for any number of examples, that is computed where it is needed."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from math import factorial

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from adaptive.data.order import Order, shuffled


def keys(seed):
    return np.random.default_rng(seed).integers(2**64, size=16, dtype=np.uint64)


def whole(order, length, epoch=0):
    return order.examples(0, epoch * length, length)


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
@example(4096, 0)
@example(4097, 0)
@example(65_537, 0)
def test_the_order_is_a_permutation_for_any_length(length, seed):
    assert np.array_equal(np.sort(shuffled(np.arange(length), length, keys(seed))), np.arange(length))


@given(st.integers(10**4, 2**61), st.integers(0, 100))
def test_positions_in_a_huge_data_set_are_distinct(length, seed):
    places = np.random.default_rng(seed).integers(0, length, 500)
    found = shuffled(places, length, keys(seed))
    assert ((found >= 0) & (found < length)).all()
    assert len(set(found.tolist())) == len(set(places.tolist()))


def test_all_orders_of_a_few_examples_are_equally_frequent():
    length, epochs = 4, 1500
    orders = Counter(tuple(whole(Order([length], 7), length, epoch).tolist()) for epoch in range(epochs))
    expected = epochs / factorial(length)
    chi2 = sum((n - expected) ** 2 / expected for n in orders.values())
    degrees = factorial(length) - 1
    assert len(orders) == factorial(length)
    assert chi2 < degrees + 5 * np.sqrt(2 * degrees)  # fixed seeds: the same in every run


def test_neighbors_and_halves_are_mixed():
    length = 20_000
    order = whole(Order([length], 0), length)
    assert abs(np.corrcoef(order, np.arange(length))[0, 1]) < 0.03
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.03
    assert abs((order[: length // 2] < length // 2).mean() - 0.5) < 0.02
    steps = np.diff(order)
    assert len(np.unique(steps)) > 0.7 * length / 2  # a lattice would have few


def test_orders_depend_on_seed_epoch_and_shard():
    length = 50
    orders = [whole(Order([length], seed), length, epoch).tolist() for seed in (0, 1, -1) for epoch in (0, 1)]
    orders += [Order([length, length], 0).examples(1, 0, length).tolist()]
    assert len({tuple(order) for order in orders}) == 7
    assert orders[0] == whole(Order([length], 0), length).tolist()


@given(st.integers(0, 30_000), st.integers(0, 5000), st.sampled_from([97, 4096, 5000, 10_000]))
def test_it_is_one_stream_however_it_is_cut(position, count, length):
    order, other = Order([length], 3), Order([length], 3)
    parts = [order.examples(0, p, min(1000, position + count - p)) for p in range(position, position + count, 1000)]
    assert np.array_equal(np.concatenate([np.zeros(0, int), *parts]), other.examples(0, position, count))


def test_a_hundred_million_examples_take_no_memory():
    tracemalloc.start()
    order = Order([10**8], 0)
    for position in range(0, 10**8, 10**7):
        order.examples(0, position, 256)
    assert tracemalloc.get_traced_memory()[1] < 2e6
    tracemalloc.stop()
