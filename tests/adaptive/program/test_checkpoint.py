"""A program that is restored from a checkpoint continues as if it had not been interrupted."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive import operators
from tests.adaptive.drivers import Recorder, mean_loss
from tests.adaptive.program.resumable import Growing, W, build, counting, course, driver_of, local, plain, state
from tests.stored import stored


@pytest.mark.parametrize(
    "keep",
    [lambda kept: pickle.loads(pickle.dumps(kept)), lambda kept: stored(jax.tree.map(np.asarray, kept))],
    ids=["in memory", "by a library"],
)
def test_a_resumed_run_is_bitwise_equal_to_the_original(keep):
    with build(driver_of(Growing()), state()) as program:
        course(program, 5)
        kept = keep(program.checkpoint())
        expected = course(program, 6)
        end = plain(program.state)
    with build(driver_of(Growing()), state(), global_batch=7, shares=(5, 2)) as other:
        course(other, 2)
        other.restore(kept)
        ((hook_state,),) = [other._parts.hooks.states]
        assert type(hook_state["steps"]) is int
        assert isinstance(hook_state["on device"], jax.Array)
        assert other.steps == 5
        assert course(other, 6) == expected
        assert jax.tree.all(jax.tree.map(np.array_equal, plain(other.state), end))


def test_a_checkpoint_has_only_arrays_and_numbers_of_its_own():
    with build(driver_of(Growing()), state()) as program:
        course(program, 2)
        kept = program.checkpoint()
        leaves = jax.tree.leaves(kept)
        assert all(isinstance(leaf, np.ndarray | np.generic | int | float) for leaf in leaves)
        copy = pickle.loads(pickle.dumps(kept))
        program.restore(kept)
        program.step()
        assert jax.tree.all(jax.tree.map(np.array_equal, kept, copy))
        for leaf in leaves:
            if isinstance(leaf, np.ndarray) and leaf.ndim:
                leaf[...] = 0
        program.restore(copy)
        assert np.array_equal(plain(program.state)["w"], copy["state"]["w"])


def test_a_restored_policy_does_not_see_earlier_steps_again():
    handler = Growing()
    with build(driver_of(handler), state()) as program:
        course(program, 4)
        kept = program.checkpoint()
        course(program, 1)
        program.restore(kept)
        handler.seen.clear()
        course(program, 2)
    assert [o.step for o in handler.seen] == [5, 6]


def test_shares_stay_in_force_after_a_restore():
    with build(driver_of(Recorder()), state(), workers=3, global_batch=10) as program:
        program.warm_up()
        program.step()
        program.restore(program.checkpoint())
        program.rescale(global_batch=21)
        assert program.batch_sizes == (7, 7, 7)


@pytest.mark.parametrize(
    ("members", "workers", "own"),
    [
        ([0, 1, 2], 3, [2, 4, 6]),
        ([0, 2], 2, [2, 6]),  # worker 1 had left: worker 2 goes on in its slot
        ([1, 2], 4, [0, 4, 6, 0]),
    ],
)
def test_on_another_number_of_workers_missing_ones_count_as_lost_and_further_ones_as_joining(members, workers, own):
    options = {"per_worker_state": lambda s: s["own"]}
    start = {"own": 0.0, "all": 0.0}
    with build(local, start, workers=3, **options) as program:
        program.step()
        program.step()
        kept = {**program.checkpoint(), "members": members}
    with build(local, start, workers=workers, **options) as other:
        other.restore(kept, other_workers_ok=True)
        assert [float(leaves[-1]) for leaves in other._parts.engine.states] == own
        report = other.step()
        assert float(other.state["all"]) == sum(x + i + 1 for i, x in enumerate(own))
        for i, (x, smooth) in enumerate(zip(own, report.metrics["smooth"], strict=True)):
            before, now = x / 2 or i + 1, i + 1  # an operator state goes with its worker
            assert min(before, now) <= smooth <= max(before, now)
            assert (smooth == now) == (before == now)


# --- through libraries that keep names, and nothing else of the containers --------------------------------------------


class Averaged(NamedTuple):
    """Sorted by name, the average comes first."""

    params: Any
    ema: Any


def averaging(state, batch):
    params = state.params - 0.1 * comm.all_reduce(jax.grad(mean_loss)(state.params, batch))
    return Averaged(params, 0.5 * (state.ema + params)), {"loss": comm.all_reduce(mean_loss(params, batch))}


def test_leaves_are_matched_by_name_and_not_by_order():
    with build(averaging, Averaged(W, 0 * W)) as program:
        course(program, 2)
        kept, state = stored(program.checkpoint()), program.state
        expected = course(program, 2)
    assert list(kept["state"]) == ["ema", "params"]
    with build(averaging, Averaged(W, 0 * W)) as other:
        other.restore(kept)
        assert jax.tree.all(jax.tree.map(np.array_equal, other.state, state))
        assert course(other, 2) == expected


def test_a_state_with_two_leaves_of_one_name_cannot_be_saved():
    start = OrderedDict([(1, 0.0), ("1", 1.0)])
    with (
        build(counting("count"), start) as program,
        pytest.raises(ad.CheckpointError, match=r"state\[1\] and state\['1'\]"),
    ):
        program.checkpoint()


class Handles(Recorder):
    """A hook with this state."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def init(self, n_workers):
        return self.state

    def __call__(self, observation, state):
        return None, state


def test_each_of_many_hooks_gets_its_own_state_back():
    def driver(state, batch):
        mean = comm.all_reduce(batch["y"].mean())
        for k in range(12):  # the tenth comes before the second, as text
            operators.hook("one", Handles(np.full(2, k)), (mean,))
        return state + mean, {}

    with build(driver, 0.0) as program:
        program.restore(program.checkpoint())
        assert [int(s[0]) for s in program._parts.hooks.states] == list(range(12))


def test_empty_arrays_are_restored_though_they_are_not_stored():
    empty = {"a": np.zeros((2, 0)), "b": np.arange(2)}
    with build(driver_of(Handles(empty)), state()) as program:
        program.step()
        program.restore(stored(program.checkpoint()))
        (found,) = program._parts.hooks.states
        assert jax.tree.all(jax.tree.map(np.array_equal, found, empty))
        assert found["a"].dtype == float
