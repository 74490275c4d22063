"""What a message contains for workers without examples, and for worker slots that belong to no process."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive.graph.plan import Scope
from adaptive.runtime.message import accumulate, lay_out, pack, unpack
from adaptive.runtime.neutral import NeutralContributions, neutral_parts
from adaptive.runtime.placement import OnDevice

from .test_message import Leaf, contributions

LEAVES = [
    Leaf("float32", (), "gather", scope=Scope.WORKER),
    Leaf("float32", (3,)),
    Leaf("int32", (2,), "gather", scope=Scope.WORKER),
    Leaf("float32", (), op="max"),
]
VALUES = [np.float32(1.5), np.float32([1, 2, 3]), np.int32([7, 8]), np.float32(-4)]


@pytest.fixture
def layout():
    """Of a message between four worker slots."""
    return lay_out(contributions(LEAVES, 4), capacity=4, status=0)


def sent_by(layout, worker):
    weights = [None if c.weight is None else jnp.float32(5) for c in layout.contributions]
    return pack(layout, list(map(jnp.asarray, VALUES)), weights, worker=jnp.int32(worker), first=jnp.float32(1))


def on_process(layout, rank, unowned):
    world = SimpleNamespace(devices=jax.devices()[:1], workers=range(rank, rank + 1), unowned_slots=unowned, rank=rank)
    return NeutralContributions(None, [layout], world, [OnDevice(d) for d in world.devices])


def test_a_worker_without_examples_and_slots_of_no_process_change_no_result(layout):
    filled = on_process(layout, 0, unowned=(2, 3)).with_gaps(0, [sent_by(layout, 0)])
    arrived = accumulate(layout.ops, filled[0], list(map(jnp.asarray, neutral_parts(layout, 1))))
    rows, mean, whole_numbers, largest = unpack(layout, arrived, range(4), worker=0)
    np.testing.assert_array_equal(rows, [1.5, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(whole_numbers, [[7, 8], [0, 0], [0, 0], [0, 0]])
    np.testing.assert_array_equal(mean, VALUES[1])
    assert largest == -4


def test_only_rank_0_fills_the_rows_of_slots_of_no_process(layout):
    parts = [sent_by(layout, 1)]
    assert on_process(layout, 1, unowned=(2, 3)).with_gaps(0, parts) is parts
    assert on_process(layout, 0, unowned=()).with_gaps(0, parts) is parts


def test_each_worker_of_a_process_has_neutral_parts_of_its_own(layout):
    """Of all messages of a level, in their order, and zeros in place of a kernel's outputs. Made once."""
    output = SimpleNamespace(aval=jax.core.ShapedArray((2,), np.dtype(np.int32)))
    plan = SimpleNamespace(
        sent_at=lambda level: ((0,), (1, 2))[level], microbatches={0: SimpleNamespace(outputs=[output])}
    )
    world = SimpleNamespace(devices=jax.devices()[:1] * 3, workers=range(1, 4))
    alone = lay_out(contributions(LEAVES[:1], 4), capacity=4, status=2)
    neutral = NeutralContributions(plan, [layout, layout, alone], world, [OnDevice(d) for d in world.devices])
    for local_index in range(3):
        found = neutral.parts(1, local_index)
        assert found is neutral.parts(1, local_index)
        expected = [part for each in (layout, alone) for part in neutral_parts(each, 1 + local_index)]
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        rows = unpack(alone, found[len(layout.parts) :], [0], worker=0)[0]
        assert np.flatnonzero(np.isnan(rows)).tolist() == [1 + local_index]
        jax.tree.map(np.testing.assert_array_equal, neutral.parts(0, local_index), expected[: len(layout.parts)])
        (zeros,) = neutral.outputs(0, local_index)
        assert (zeros.tolist(), zeros.dtype) == ([0, 0], np.int32)
        assert neutral.outputs(0, local_index)[0] is zeros


def test_rows_of_gaps_are_those_of_the_slots_that_are_free_now(layout):
    world = SimpleNamespace(devices=jax.devices()[:1], workers=range(1), unowned_slots=(3,), rank=0)
    neutral = NeutralContributions(None, [layout], world, [OnDevice(d) for d in world.devices])
    sent = [sent_by(layout, 0), sent_by(layout, 1)]
    for free in ((3,), (2, 3), (2,)):
        world.unowned_slots = free
        first, other = neutral.with_gaps(0, sent)
        rows = unpack(layout, first, [0], worker=0)[0]
        assert np.flatnonzero(np.isnan(rows)).tolist() == list(free)
        assert other is sent[1]
