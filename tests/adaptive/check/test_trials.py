"""Splits of a batch, and trials that differ from one another by rounding errors."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from adaptive.check.rounding import nudged
from adaptive.check.trials import even_split, uneven_splits, with_fewer_workers


def of_plan(multiple=1, *, splittable=True):
    messages = [[SimpleNamespace(how=SimpleNamespace(needed=(1,)))]]
    return SimpleNamespace(multiple=multiple, splittable=splittable, messages=messages)


@pytest.mark.parametrize(("workers", "multiple", "splittable"), [(1, 1, True), (2, 4, False), (5, 1, True)])
@pytest.mark.parametrize("examples", [24, 160, 400])
def test_splits_share_all_examples_within_the_limits(workers, multiple, splittable, examples):
    plan, limits = of_plan(multiple, splittable=splittable), {"most": 32} if splittable else {}
    even = even_split(examples, workers, plan, **limits)
    splits = [s for seed in range(10) for s in uneven_splits(np.random.default_rng(seed), 3, even, plan, **limits)]
    fewer = with_fewer_workers(even, plan)
    assert even not in splits
    assert len(splits) == 30
    for split in (even, *splits, *fewer):
        assert len(split) == workers
        assert sum(map(sum, split)) == examples
        assert all(size > 0 and size % multiple == 0 for microbatches in split for size in microbatches)
        assert all(max(own, default=0) <= 32 for own in split) or not splittable
        assert splittable or all(len(own) == 1 for own in split if own)
    assert all(map(all, splits))  # no worker is without examples
    assert [sum(map(bool, split)) for split in fewer] == {1: [], 2: [1], 5: [4, 1]}[workers]
    assert all(split[1] for split in fewer)  # which the driver's collectives need
    assert max(map(sum, even)) - min(map(sum, even)) <= multiple


def test_an_even_split_has_as_few_microbatches_as_its_limits_allow():
    assert even_split(21, 2, of_plan()) == ((11,), (10,))
    assert even_split(21, 2, of_plan(), most=5) == ((4, 4, 3), (5, 5))
    assert even_split(21, 2, of_plan(), least=2) == ((6, 5), (5, 5))
    assert even_split(4, 3, of_plan(), least=2) == ((1, 1), (1,), (1,))


def test_inputs_are_moved_by_their_last_places_alone():
    rng, eps = np.random.default_rng(0), float(np.finfo(np.float32).eps)
    x = np.linspace(0.1, 100, 200, dtype=np.float32)
    after = nudged(x, rng, whole=False)
    moved = np.abs(after / x - 1)
    assert after.dtype == np.float32
    assert 0.5 * eps < moved.max() <= 2.5 * eps
    labels, counters, key = np.arange(200.0), (np.int32(3), np.float32(2)), jax.random.key(0)
    for kept, whole in ((labels, False), *((counter, True) for counter in counters), (key, True)):
        assert nudged(kept, rng, whole=whole) is kept
    assert 0 < np.abs(nudged(np.zeros(50, np.float32), rng, whole=True)).max() <= 2 * eps
