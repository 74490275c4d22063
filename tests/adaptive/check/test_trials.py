"""Splits of a batch, and trials that differ from one another by rounding errors or by one reduction alone."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive.check.trials import Bench, Start, even_split, fine_split, uneven_splits, with_fewer_workers
from adaptive.graph.flow import Scope
from adaptive.graph.plan import Contribution
from adaptive.runtime.message import lay_out, pack, unpack
from collectives._reduce import Reduce
from tests.adaptive.runtime.test_message import variable

EPS = float(jnp.finfo(jnp.float32).eps)


def of_plan(multiple=1, *, splittable=True):
    return SimpleNamespace(multiple=multiple, splittable=splittable)


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("splittable", [True, False])
@pytest.mark.parametrize("examples", [24, 160, 400])
def test_every_microbatch_keeps_the_drivers_multiple(workers, splittable, examples):
    plan = of_plan(4, splittable=splittable)
    even, fine = even_split(examples, workers, plan), fine_split(examples, workers, plan)
    splits = [split for seed in range(10) for split in uneven_splits(np.random.default_rng(seed), 3, even, plan)]
    assert bool(splits) == (splittable or workers > 1)
    for split in (even, fine, *splits):
        assert len(split) == workers
        assert sum(map(sum, split)) == examples
        assert all(size > 0 and size % 4 == 0 for microbatches in split for size in microbatches)
        assert splittable or all(len(microbatches) == 1 for microbatches in split)
    for split in (even, fine):
        totals = list(map(sum, split))
        assert max(totals) - min(totals) <= 4
    assert max(map(max, fine)) == (4 * -(-examples // 256) if splittable else max(map(sum, even)))


def test_an_even_split_has_as_few_microbatches_as_its_limits_allow():
    assert even_split(21, 2, of_plan()) == ((11,), (10,))
    assert even_split(21, 2, of_plan(), most=4) == ((4, 4, 3), (4, 3, 3))
    assert even_split(21, 2, of_plan(), most=5) == ((4, 4, 3), (5, 5))
    assert even_split(21, 2, of_plan(), least=2) == ((6, 5), (5, 5))
    assert even_split(21, 2, of_plan(), least=3, most=5) == ((4, 4, 3), (4, 3, 3))
    assert even_split(4, 3, of_plan(), least=2) == ((1, 1), (1,), (1,))


def test_a_fine_split_has_about_sixty_microbatches():
    assert fine_split(640, 2, of_plan()) == ((10,) * 32,) * 2
    assert fine_split(641, 2, of_plan()) == ((11,) * 29 + (2,), (11,) * 29 + (1,))
    assert fine_split(640, 2, of_plan(), most=8) == ((8,) * 40,) * 2


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
    shared, own = [jnp.asarray(x), jnp.int32(3), jnp.float32(2)], [jnp.asarray(x), jnp.float32(7.5)]
    start = Start([[*shared, w * own[0]] for w in (1, 2)], [["an operator state"]])
    nudged, batch = Bench.nudged(bench({"x": x, "label": np.arange(200)}, [3]), start, np.random.default_rng(0))
    for before, after in ((x, nudged.states[0][0]), (x, batch["x"])):
        moved = np.abs(np.asarray(after) / before - 1)
        assert after.dtype == np.float32
        assert 0.5 * EPS < moved.max() <= 2.5 * EPS
        assert np.unique(np.asarray(after) > before).size == 2
    assert batch["label"].tolist() == list(range(200))
    assert [float(leaf) for leaf in nudged.states[0][1:3]] == [3, 2]  # a counter
    assert all(a is b for a, b in zip(nudged.states[0][:3], nudged.states[1][:3], strict=True))
    assert [leaves[3] is given[3] for leaves, given in zip(nudged.states, start.states, strict=True)] == [True, True]
    assert nudged.op_states is start.op_states


@pytest.mark.parametrize("whole", [False, True])
def test_whole_numbers_are_moved_on_request(whole):
    zeros, threes, count = np.zeros(50, np.float32), np.full(50, 3, np.float32), np.zeros((), np.float32)
    start = Start([[zeros, threes, count]], [])
    nudged, batch = Bench.nudged(bench(threes), start, np.random.default_rng(0), whole=whole)
    moved = [
        np.abs(np.asarray(a, np.float64) - b).max() for a, b in zip(nudged.states[0], start.states[0], strict=True)
    ]
    assert np.array_equal(batch, threes)
    assert moved[2] == 0
    assert (0 < moved[0] <= 2 * EPS * (1 + 2 * EPS)) == whole
    assert (0 < moved[1] <= 7 * EPS) == whole


def test_examples_change_places_within_their_microbatch_only():
    batch = {"x": np.arange(20), "y": 10 * np.arange(20)}
    again = Bench.reordered(bench(batch), ((8, 2), (10,)), np.random.default_rng(0))
    assert np.array_equal(10 * again["x"], again["y"])
    for start, end in ((0, 8), (8, 10), (10, 20)):
        assert sorted(again["x"][start:end]) == list(range(start, end))
    assert not np.array_equal(again["x"], batch["x"])


@pytest.mark.parametrize("their_weight", [1.0, 3.0, 5.0])
def test_one_reduction_is_replaced_by_its_value_of_another_trial(their_weight):
    weights = [variable((), "f") for _ in range(2)]
    kinds = [("mean", weights[0], (2,)), ("mean", weights[1], (3,)), ("sum", None, ()), ("max", None, (2,))]
    layout = lay_out(
        [
            Contribution("", Reduce(op), variable(shape, "f"), weight, variable(shape, "f"), Scope.MICROBATCH, "")
            for op, weight, shape in kinds
        ],
        capacity=2,
        status=1,
    )

    def trial(factor, weight):
        values = [factor * jnp.arange(1.0, 1 + int(np.prod(shape))).reshape(shape) for _, _, shape in kinds]
        given = [jnp.float32(weight), jnp.float32(2 * weight), None, None]
        return [np.asarray(p) for p in pack(layout, values, given, worker=jnp.int32(0), first=jnp.float32(1))]

    here, there = trial(1.0, 3.0), trial(10.0, their_weight)
    runner = SimpleNamespace(_trial=SimpleNamespace(layouts=[None, layout]))
    want = [np.asarray(v) for v in unpack(layout, here, range(4), worker=0)]
    for i in range(4):
        instead = Bench.taking(runner, SimpleNamespace(brought=[None, there]), (1, i))
        assert instead(0, here) is here
        found = unpack(layout, list(map(jnp.asarray, instead(1, here))), range(4), worker=0)
        expected = [10 * v if k == i else v for k, v in enumerate(want)]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), list(found), expected)
