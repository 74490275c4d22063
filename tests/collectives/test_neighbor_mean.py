"""Schedules of neighbor means: who averages with whom; and a mean by one of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive import CollectiveError
from adaptive.runtime.local_world import LocalWorld
from collectives._neighbor_mean import Matchings, RandomMatchings, Ring, schedule_of

MEMBERS = [0, 2, 3, 5, 6]


def pairs(weights):
    """Return the pairs of a matching."""
    for own, row in weights.items():
        assert set(row.values()) == {0.5}
        (other,) = set(row) - {own}
        assert weights[other] == row
    return {tuple(sorted(row)) for row in weights.values()}


@pytest.mark.parametrize("n", range(1, 6))
@pytest.mark.parametrize("schedule", ["random", "ring"])
def test_every_mean_and_every_workers_shares_add_up_to_one(schedule, n):
    members = MEMBERS[:n]
    for step in range(6):
        weights = schedule_of("neighbor_mean", schedule, 7).weights(step, members)
        matrix = np.array([[weights.get(i, {i: 1.0}).get(j, 0.0) for j in members] for i in members])
        np.testing.assert_allclose(matrix.sum(0), 1)
        np.testing.assert_allclose(matrix.sum(1), 1)
        assert n == 1 or schedule == "random" or len(weights) == n


@pytest.mark.parametrize(("n", "matched"), [(1, 0), (2, 2), (4, 4), (5, 4)])
def test_random_pairs_include_as_many_workers_as_possible_and_change(n, matched):
    drawn = [pairs(RandomMatchings().weights(step, MEMBERS[:n])) for step in range(20)]
    assert all(len({worker for pair in found for worker in pair}) == 2 * len(found) == matched for found in drawn)
    assert drawn == [pairs(RandomMatchings().weights(step, MEMBERS[:n])) for step in range(20)]
    if n > 2:
        assert len({frozenset(found) for found in drawn}) > 2
        assert drawn != [pairs(RandomMatchings(1).weights(step, MEMBERS[:n])) for step in range(20)]
        assert {worker for found in drawn for pair in found for worker in pair} == set(MEMBERS[:n])


def test_in_a_ring_workers_average_with_both_neighbors():
    assert Ring().weights(3, MEMBERS[:1]) == {}
    assert pairs(Ring().weights(3, MEMBERS[:2])) == {(0, 2)}
    third = dict.fromkeys(MEMBERS[:3], 1 / 3)
    assert Ring().weights(3, MEMBERS[:3]) == dict.fromkeys(MEMBERS[:3], third)
    found = {own: {*row} for own, row in Ring().weights(3, MEMBERS).items()}
    assert found == {0: {6, 0, 2}, 2: {0, 2, 3}, 3: {2, 3, 5}, 5: {3, 5, 6}, 6: {5, 6, 0}}


def test_given_pairs_take_turns_without_those_that_are_absent():
    schedule = schedule_of("neighbor_mean", [[(0, 2), (3, 5)], [(np.int64(2), 4)], []], 6)
    assert isinstance(schedule, Matchings)
    found = [pairs(schedule.weights(step, [0, 2, 4, 5])) for step in range(6)]
    assert found == [{(0, 2)}, {(0, 2)}, {(2, 4)}, set(), {(0, 2)}, {(2, 4)}]


@pytest.mark.parametrize(
    ("schedule", "workers"),
    [
        *(
            (schedule, 4)
            for schedule in ("star", 3, [], [[(0, 1)], [(0, 1, 2)]], [[(0,)]], [[(0, 1.5)]], [[(0, None)]])
        ),
        *((schedule, 4) for schedule in ([[(0, 1), (1, 2)]], [[(2, 2)]], [[(0, 4)]], [[(-1, 0)]])),
        ([[(-1, 0)]], None),
    ],
)
def test_what_is_no_schedule_is_refused(schedule, workers):
    with pytest.raises(CollectiveError, match=r"must be one of 'random', 'ring'; or, .* pairs of"):
        schedule_of("neighbor_mean", schedule, workers)
    assert schedule_of("neighbor_mean", [[(0, 3), (1, 2)], [(0, 1)], []], workers)
    assert schedule_of("neighbor_mean", [[(0, 1000)]], None)


def test_a_worker_without_examples_is_in_no_mean():
    def driver(state, batch):
        number = ad.worker_index().astype(jnp.float32)
        own = {"m": jnp.full((2, 3), number), "s": number, "z": jnp.full(2, number.astype(jnp.complex64))}
        mean = comm.neighbor_mean(own, [[(0, 1), (2, 3)]])
        return state, comm.all_gather(mean)

    data, world = np.ones(96, np.float32), LocalWorld(4)
    program = ad.Program(driver, 0.0, data, global_batch=12, shares=(1, 1, 1, 0), resizable=False, world=world)
    for rows in jax.tree.leaves(program.step().metrics):
        for row, expected in zip(rows, [0.5, 0.5, 2.0, np.nan], strict=True):
            np.testing.assert_allclose(row.real, np.full(row.shape, expected, np.float32))
