"""Which process keeps which copies and continues which per-worker state; and worlds without copies."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.program.memory_copies import heirs, partners


def test_the_partner_is_on_the_next_host():
    hosts = {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}
    assert partners(hosts) == {0: 2, 1: 3, 2: 4, 3: 5, 4: 0, 5: 1}
    assert partners({0: 0, 1: 0, 2: 7}) == {0: 2, 1: 2, 2: 0}


@pytest.mark.parametrize(
    ("joined", "orphans", "same_slot", "expected"),
    [
        ([2], [1], False, {1: 2}),
        ([2], [1], True, {}),
        ([1, 2], [2, 1], True, {1: 1, 2: 2}),
        ([3, 1], [0, 1], False, {1: 1, 0: 3}),
        ([3], [0, 1], False, {0: 3}),
        ([2, 3], [1], False, {1: 2}),
    ],
)
def test_who_continues_whose_state(joined, orphans, same_slot, expected):
    assert heirs(joined, orphans, same_slot=same_slot) == expected


def driver(state, batch):
    return state + comm.all_reduce(batch["x"].mean()), {}


def test_copies_in_memory_need_a_world_that_can_lose_processes():
    program = ad.Program(driver, jnp.zeros(()), {"x": np.arange(8, dtype=np.float32)}, global_batch=4)
    first, second = program.run(steps=2, checkpoint=ad.Checkpoints(memory=1))
    assert first.notes == ("memory=1 has no effect: this world cannot lose a process.",)
    assert second.notes == ()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"memory": 2}, "memory=2"),
        ({"memory": "yes"}, "memory='yes'"),
        ({"memory": 1, "memory_every": 0}, "memory_every=0"),
        ({"memory": 1, "memory_every": 1.5}, "memory_every=1.5"),
        ({}, "must be a path"),
    ],
)
def test_bad_options(options, what):
    with pytest.raises(ad.CheckpointError, match=what):
        ad.Checkpoints(**options)
