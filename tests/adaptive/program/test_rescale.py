"""`rescale(workers=…)`, from hooks and from outside: workers leave and join, and it is the same training.

A checkpoint has the requested batch and number of workers, beside the feasible ones in force.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from adaptive.runtime.local_world import LocalWorld
from tests import problems
from tests.problems import adam_driver, adam_state, descend, difference, make_data, plain_adam, stream
from tests.stored import stored

DATA = {"x": np.random.default_rng(0).normal(size=(300, 2)).astype(np.float32)}


class Slow(LocalWorld):
    """Workers come when the test says so."""

    come = False

    def poll_ready(self):
        return super().poll_ready() if self.come else 0


def build(world, driver=descend, global_batch=12, **options):
    return problems.build(driver, 0.0, DATA, global_batch, world=world, **{"resizable": True, **options})


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_random_numbers_of_workers_train_as_a_plain_loop_does(seed):
    """And every example is taken exactly once in an epoch."""

    def driver(state, batch):
        numbers = batch["n"].astype(float)
        once = comm.all_reduce({"sum": numbers.sum(), "squares": jnp.square(numbers).sum()}, op="sum")
        return *adam_driver(state, {k: v for k, v in batch.items() if k != "n"})[:1], once

    with jax.enable_x64(True):
        rng, data, world = np.random.default_rng(seed), make_data(), LocalWorld(4, workers=2)
        data = {**data, "n": np.arange(len(data["x"]))}
        who, batches, sums = set(), [], []
        with problems.build(driver, adam_state(), data, 20, world=world, resizable=True) as program:
            program.warm_up()
            for _ in range(30):
                if rng.random() < 0.5:
                    batch = {"global_batch": int(rng.choice([10, 20, 40]))} if rng.random() < 0.4 else {}
                    program.rescale(workers=int(rng.integers(1, 5)), **batch)
                report = program.step()
                assert len(report.members) == program.target_workers
                who.add(report.members)
                batches.append(report.global_batch)
                sums.append((float(report.metrics["sum"]), float(report.metrics["squares"])))
            ours = program.state["params"]
        assert len(who) == 4
        assert difference(ours, plain_adam(data, batches, 3)) < 1e-10
    rows, ends = stream(len(data["n"]), 3, sum(batches)).astype(float), np.cumsum([0, *batches])
    expected = [(rows[a:b].sum(), (rows[a:b] ** 2).sum()) for a, b in itertools.pairwise(ends)]
    assert np.allclose(sums, expected, rtol=1e-12)
    assert sorted(rows[: len(data["n"])]) == list(range(len(data["n"])))


def test_a_batch_beyond_the_present_workers_is_used_when_others_have_joined():
    world = Slow(4, workers=2)
    with build(world, max_local_batch=8, deterministic=True) as program:
        for workers, batch, says in ((3, 32, "more than the maximum of the 3 workers"), (4, 3, "too small for 4 work")):
            with pytest.raises(ad.BatchSizeError, match=says):
                program.rescale(workers=workers, global_batch=batch)
        program.rescale(workers=4, global_batch=32)
        assert [program.step().global_batch for _ in range(2)] == [16, 16]
        program.rescale(global_batch=31)  # for those who were asked for
        program.rescale(shares=[1, 1, 1, 1])  # which leaves the batch as it was asked for
        world.come = True
        report = program.step()
        assert (report.members, report.joined, report.batch_sizes) == ((0, 1, 2, 3), (2, 3), (8, 8, 8, 7))
        world.come = False
        program.rescale(workers=1, global_batch=3)
        assert program.step().batch_sizes == (3, 0, 0, 0)


def test_an_impossible_number_of_workers_raises_and_changes_nothing():
    with build(LocalWorld(4, workers=2)) as program:
        for workers, says in ((0, "at least one"), (5, "1 to 4 are"), (float("nan"), "whole"), ("2", "whole")):
            with pytest.raises(ad.WorkerCountError, match=says):
                program.rescale(workers=workers, global_batch=24)
        report = program.step()
        assert (report.members, report.global_batch, program.target_workers) == ((0, 1), 12, 2)
    with build(LocalWorld(4, workers=2), resizable=False) as program:
        with pytest.raises(ad.BatchSizeError, match="resizable=False"):
            program.rescale(workers=3)
        assert program.step().members == (0, 1)


def test_in_a_fixed_world_a_request_for_workers_is_noted():
    def driver(state, batch):
        ctrl.hook(lambda control: control.rescale(workers=3 - control.step))
        return descend(state, batch)

    with build(comm.SoloWorld(), driver) as program:
        notes = [program.step().notes for _ in range(2)]
        assert notes == [("hook '<lambda>': workers 2 clipped to 1, the most available.",), ()]
        with pytest.raises(ad.WorkerCountError, match="1 is"):
            program.rescale(workers=2)


def test_skipped_steps_do_not_keep_anybody_from_joining():
    def driver(state, batch):
        return descend(state, {"x": jnp.where(ad.step_number() < 2, jnp.nan, batch["x"])})

    with build(LocalWorld(3, workers=1), driver, nonfinite="skip") as program:
        program.rescale(workers=2)
        assert program.step().skipped
        program.rescale(workers=3)
        report = program.step()
        assert (report.skipped, report.members) == (True, (0, 1, 2))
        assert not program.step().skipped


# --- requests in checkpoints ------------------------------------------------------------------------------------------


@functools.cache
def clipped_by_a_leave():
    world = LocalWorld(3)
    with build(world, global_batch=30, max_local_batch=10) as program:
        program.step()
        world.leave(2)
        assert program.step().batch_sizes == (10, 10, 0)
        return program.checkpoint()


@functools.cache
def clipped_as_nobody_has_joined_yet():
    with build(Slow(3, workers=2), global_batch=14, max_local_batch=10) as program:
        program.warm_up()
        program.step()
        program.rescale(workers=3, global_batch=30)
        assert program.step().batch_sizes == (10, 10, 0)
        return program.checkpoint()


@pytest.mark.parametrize("clipped", [clipped_by_a_leave, clipped_as_nobody_has_joined_yet])
def test_a_clipped_batch_returns_to_the_requested_size_with_more_workers(clipped):
    kept = stored(clipped())
    with build(LocalWorld(3), global_batch=9, max_local_batch=10) as program:
        program.restore(kept)
        assert program.step().batch_sizes == (10, 10, 10)
    world = LocalWorld(3, workers=2)
    with build(world, global_batch=9, max_local_batch=10) as program:
        program.restore({**kept, "workers": 0})
        assert program.step().batch_sizes == (10, 10, 0)
        assert program.checkpoint()["global_batch"] == 30
        world.join(2)
        assert program.step().batch_sizes == (10, 10, 10)


@pytest.mark.parametrize(("slots", "sizes"), [(2, (10, 10)), (4, (8, 8, 7, 7))])
def test_on_another_number_of_slots_the_batch_is_clipped_to_these(slots, sizes):
    with build(LocalWorld(slots), global_batch=slots, max_local_batch=10) as program:
        program.restore(clipped_by_a_leave())
        assert program.step().batch_sizes == sizes
        assert program.checkpoint()["global_batch"] == 30


@pytest.mark.parametrize(("at_first", "then"), [(3, 2), (2, 3)])
def test_a_restore_in_place_returns_to_the_saved_number_of_workers_and_one_elsewhere_uses_all(at_first, then):
    """A restore undoes a request made after the checkpoint, with or without an earlier one."""
    with build(LocalWorld(3, workers=at_first)) as program:
        program.step()
        kept = program.checkpoint()
        program.rescale(workers=then)
        program.step()
        assert len(program.step().members) == then
        program.restore(kept)
        assert program.target_workers == at_first
        program.step()
        assert len(program.step().members) == at_first
    with build(LocalWorld(3)) as program:
        program.restore(kept)
        assert program.target_workers == 3
        assert len(program.step().members) == 3
