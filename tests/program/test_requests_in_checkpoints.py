"""A checkpoint has the requested batch and number of workers, beside the feasible ones in force."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.disk.folders import arrays_of, checkpoints, read, write
from adaptive.runtime.local_world import LocalWorld


def driver(state, batch):
    return state + comm.all_reduce(batch["x"].mean()), {"n": ad.num_workers()}


def build(world, global_batch=30):
    data = {"x": np.arange(300.0, dtype=np.float32)}
    return ad.Program(driver, jnp.zeros(()), data, global_batch=global_batch, max_local_batch=10, world=world)


def stored(kept, tmp_path):
    """The checkpoint after a round trip to disk."""
    write(tmp_path, 1, kept["step"], arrays_of(kept))
    return read(*checkpoints(tmp_path))


@functools.cache
def clipped_by_a_leave():
    world = LocalWorld(3)
    with build(world) as program:
        program.step()
        world.leave(2)
        assert program.step().batch_sizes == (10, 10, 0)
        return program.checkpoint()


@functools.cache
def clipped_as_nobody_has_joined_yet():
    class Slow(LocalWorld):
        def poll_ready(self):
            return 0

    with build(Slow(3, workers=2), global_batch=14) as program:
        program.warm_up()
        program.step()
        program.rescale(workers=3, global_batch=30)
        assert program.step().batch_sizes == (10, 10, 0)
        return program.checkpoint()


CLIPPED = [clipped_by_a_leave, clipped_as_nobody_has_joined_yet]


@pytest.mark.parametrize("clipped", CLIPPED)
def test_a_clipped_batch_returns_to_the_requested_size_when_all_workers_are_back(clipped, tmp_path):
    with build(LocalWorld(3), global_batch=9) as program:
        program.restore(stored(clipped(), tmp_path))
        assert program.step().batch_sizes == (10, 10, 10)


@pytest.mark.parametrize("clipped", CLIPPED)
def test_a_clipped_batch_grows_when_other_workers_join(clipped, tmp_path):
    world = LocalWorld(3, workers=2)
    with build(world, global_batch=9) as program:
        program.restore({**stored(clipped(), tmp_path), "workers": 0})
        assert program.step().batch_sizes == (10, 10, 0)
        again = program.checkpoint()
        assert again["global_batch"] == 30
        world.join(2)
        assert program.step().batch_sizes == (10, 10, 10)


@pytest.mark.parametrize(("worker_slots", "sizes"), [(2, (10, 10)), (4, (8, 8, 7, 7)), (1, (10,))])
def test_on_another_number_of_slots_the_batch_is_clipped_to_these(worker_slots, sizes):
    kept = clipped_by_a_leave()
    with build(LocalWorld(worker_slots), global_batch=worker_slots) as program:
        program.restore(kept)
        assert program.step().batch_sizes == sizes
        assert program.checkpoint()["global_batch"] == 30


def test_an_invalid_global_batch_is_refused():
    with build(LocalWorld(3)) as program:
        for wrong in (-3, 2.5, "thirty"):
            with pytest.raises(ad.CheckpointError, match="global_batch"):
                program.restore({**clipped_by_a_leave(), "global_batch": wrong})


@pytest.mark.parametrize(("at_first", "then"), [(3, 2), (2, 3)])
def test_a_restore_in_place_returns_to_the_saved_number_of_workers(at_first, then):
    """A restore undoes a request made after the checkpoint, with or without an earlier one."""
    world = LocalWorld(3, workers=at_first)
    with build(world, global_batch=10) as program:
        program.step()
        kept = program.checkpoint()
        program.rescale(workers=then)
        program.step()
        assert program.step().metrics["n"] == then
        program.restore(kept)
        assert program.target_workers == at_first
        program.step()
        assert program.step().metrics["n"] == at_first


def test_a_restore_elsewhere_uses_all_workers_without_a_request():
    with build(LocalWorld(3, workers=2), global_batch=10) as program:
        program.step()
        kept = program.checkpoint()
    with build(LocalWorld(3), global_batch=10) as program:
        program.restore(kept)
        assert program.target_workers == 3
        assert program.step().metrics["n"] == 3
