"""Splits of a batch, and trials that differ from one another by rounding errors."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from adaptive.check.trials import Bench, Start, even_split, uneven_splits, with_fewer_workers

EPS = float(jnp.finfo(jnp.float32).eps)


def of_plan(multiple=1, *, splittable=True):
    return SimpleNamespace(multiple=multiple, splittable=splittable)


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("splittable", [True, False])
@pytest.mark.parametrize("examples", [24, 160, 400])
def test_every_microbatch_keeps_the_drivers_multiple(workers, splittable, examples):
    plan = of_plan(4, splittable=splittable)
    even = even_split(examples, workers, plan)
    splits = [split for seed in range(10) for split in uneven_splits(np.random.default_rng(seed), 3, even, plan)]
    assert bool(splits) == (splittable or workers > 1)
    for split in (even, *splits):
        assert len(split) == workers
        assert sum(map(sum, split)) == examples
        assert all(size > 0 and size % 4 == 0 for microbatches in split for size in microbatches)
        assert splittable or all(len(microbatches) == 1 for microbatches in split)
    totals = list(map(sum, even))
    assert max(totals) - min(totals) <= 4


def test_an_even_split_has_as_few_microbatches_as_its_limits_allow():
    assert even_split(21, 2, of_plan()) == ((11,), (10,))
    assert even_split(21, 2, of_plan(), most=4) == ((4, 4, 3), (4, 3, 3))
    assert even_split(21, 2, of_plan(), most=5) == ((4, 4, 3), (5, 5))
    assert even_split(21, 2, of_plan(), least=2) == ((6, 5), (5, 5))
    assert even_split(21, 2, of_plan(), least=3, most=5) == ((4, 4, 3), (4, 3, 3))
    assert even_split(4, 3, of_plan(), least=2) == ((1, 1), (1,), (1,))


def bench(batch, local_state=()):
    return SimpleNamespace(plan=SimpleNamespace(local_state=frozenset(local_state)), batch=batch)


@pytest.mark.parametrize("splittable", [True, False])
def test_fewer_workers_take_the_same_examples(splittable):
    plan = of_plan(splittable=splittable)
    plan.messages = [[SimpleNamespace(how=SimpleNamespace(needed=(1,)))]]
    even = even_split(10, 4, plan)
    found = with_fewer_workers(even, plan)
    assert [sum(map(bool, split)) for split in found] == ([3, 1] if splittable else [3])
    assert all(sum(map(sum, split)) == 10 and split[1] for split in found)
    assert found[0][0] == ()  # not always the first workers
    assert with_fewer_workers(((10,),), plan) == ()


def test_inputs_are_moved_by_their_last_places_alone():
    x = np.linspace(0.1, 100, 200, dtype=np.float32)
    shared, own = [jnp.asarray(x), jnp.int32(3), jnp.float32(2), jnp.zeros(50)], [jnp.asarray(x), jnp.float32(7.5)]
    start = Start([[*shared, w * own[0]] for w in (1, 2)], [["an operator state"]])
    nudged, batch = Bench.nudged(bench({"x": x, "label": np.arange(200.0)}, [4]), start, np.random.default_rng(0))
    for before, after in ((x, nudged.states[0][0]), (x, batch["x"])):
        moved = np.abs(np.asarray(after) / before - 1)
        assert after.dtype == np.float32
        assert 0.5 * EPS < moved.max() <= 2.5 * EPS
        assert np.unique(np.asarray(after) > before).size == 2
    assert batch["label"].tolist() == list(range(200))  # whole numbers of a batch, such as labels
    assert [float(leaf) for leaf in nudged.states[0][1:3]] == [3, 2]  # a counter
    assert 0 < np.abs(nudged.states[0][3]).max() <= 2 * EPS * (1 + 2 * EPS)
    assert all(a is b for a, b in zip(nudged.states[0][:4], nudged.states[1][:4], strict=True))
    assert [leaves[4] is given[4] for leaves, given in zip(nudged.states, start.states, strict=True)] == [True, True]
    assert nudged.op_states is start.op_states
