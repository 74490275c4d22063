"""`rescale(workers=…)`, from hooks and from outside: workers leave and join, and it is the same training."""

from __future__ import annotations

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from adaptive.runtime.local_world import LocalWorld

from . import problems
from .problems import adam_driver, adam_state, descend, difference, make_data, plain_adam, stream
from .test_members import Compilations, data_of

SEED = 3
build = functools.partial(problems.build, resizable=True)  # for those who come


def world_of(kind: str, workers: int | None = None, worker_slots: int = 4):
    if kind == "local":
        return LocalWorld(worker_slots, workers=workers)
    return comm.DeviceWorld(jax.local_devices()[:worker_slots], workers=workers)


@pytest.fixture(params=["local", pytest.param("devices", marks=pytest.mark.long)])
def kind(request):
    return request.param


@pytest.mark.parametrize("precision", ["float64"], indirect=True)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_random_numbers_of_workers_train_as_a_plain_loop_does(kind, precision, seed):
    """And every example is taken exactly once in an epoch."""
    rng, data, world = np.random.default_rng(seed), make_data(), world_of(kind, 2)
    data = {**data, "n": np.arange(len(data["x"]))}
    who, batches, sums = set(), [], []

    def driver(state, batch):
        numbers = batch["n"].astype(float)
        once = comm.all_reduce({"sum": numbers.sum(), "squares": jnp.square(numbers).sum()}, op="sum")
        return *adam_driver(state, {k: v for k, v in batch.items() if k != "n"})[:1], once

    with build(driver, adam_state(), data, 20, world=world) as program:
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
    assert difference(ours, plain_adam(data, batches, SEED)) < 1e-10
    rows, ends = stream(len(data["n"]), SEED, sum(batches)).astype(float), np.cumsum([0, *batches])
    expected = [(rows[a:b].sum(), (rows[a:b] ** 2).sum()) for a, b in itertools.pairwise(ends)]
    assert np.allclose(sums, expected, rtol=1e-12)
    epoch = rows[: len(data["n"])]
    assert sorted(epoch) == list(range(len(data["n"])))


def test_leaving_and_joining_within_the_capacity_traces_and_compiles_nothing(kind):
    with build(descend, jnp.zeros(()), data_of(), 16, world=world_of(kind, 2)) as program:
        program.warm_up()
        first = program.step()
        with Compilations() as compilations:
            for workers in (4, 1, 3, 2):
                program.rescale(workers=workers)
                report = program.step()
                assert (len(report.members), report.global_batch) == (workers, 16)
                assert report.waited_seconds == first.waited_seconds
            assert program._parts.engine.kernels.warm
            assert compilations == []
            jax.jit(lambda x: x + 1)(1.0)
            assert compilations  # so it would have been seen
    assert report.kernels == first.kernels


def test_the_highest_worker_slots_leave_and_the_lowest_free_ones_are_taken(kind):
    with build(descend, jnp.zeros(()), data_of(), 12, world=world_of(kind, 2)) as program:
        assert program.step().batch_sizes == (6, 6, 0, 0)
        program.rescale(workers=4)
        assert (program.members, program.target_workers) == ((0, 1), 4)
        report = program.step()
        assert (report.members, report.joined, report.batch_sizes) == ((0, 1, 2, 3), (2, 3), (3, 3, 3, 3))
        assert report.notes == ("a worker has joined in worker slot 2.", "a worker has joined in worker slot 3.")
        program.rescale(workers=1)
        report = program.step()
        assert (report.members, report.joined, report.batch_sizes) == ((0,), (), (12, 0, 0, 0))
        program.world.leave(0) if program.world.members != (0,) else program.world.join(2)
        program.rescale(workers=2)  # those that there are by now
        assert program.step().members == (0, 2)


def test_a_batch_beyond_the_present_workers_is_used_when_others_have_joined():
    class Slow(LocalWorld):
        come = False

        def poll_ready(self):
            return super().poll_ready() if self.come else 0

    world = Slow(4, workers=2)
    options = {"max_local_batch": 8, "deterministic": True}
    with build(descend, jnp.zeros(()), data_of(96), 12, world=world, **options) as program:
        program.rescale(workers=4, global_batch=32)
        assert [program.step().global_batch for _ in range(2)] == [16, 16]
        program.rescale(global_batch=31)  # for those who were asked for
        program.rescale(shares=[1, 1, 1, 1])  # which leaves the batch as it was asked for
        world.come = True
        report = program.step()
        assert (report.members, report.batch_sizes) == ((0, 1, 2, 3), (8, 8, 8, 7))
        world.come = False
        program.rescale(workers=1, global_batch=3)
        assert program.step().batch_sizes == (3, 0, 0, 0)


def test_between_steps_an_impossible_request_raises_and_changes_nothing():
    with build(descend, jnp.zeros(()), data_of(), 12, world=LocalWorld(4, workers=2)) as program:
        for workers, says in ((0, "at least one"), (5, "1 to 4 are"), (float("nan"), "whole"), ("2", "whole")):
            with pytest.raises(ad.WorkerCountError, match=says):
                program.rescale(workers=workers, global_batch=24)
        report = program.step()
        assert (report.members, report.global_batch, program.target_workers) == ((0, 1), 12, 2)


def test_between_steps_a_batch_must_fit_the_future_workers():
    with build(descend, jnp.zeros(()), data_of(96), 12, world=LocalWorld(4, workers=2), max_local_batch=8) as program:
        with pytest.raises(ad.BatchSizeError, match="more than the maximum of the 3 workers"):
            program.rescale(workers=3, global_batch=32)
        with pytest.raises(ad.BatchSizeError, match="too small for 4 workers"):
            program.rescale(workers=4, global_batch=3)
        assert program.target_workers == 2
        program.rescale(workers=4, global_batch=32)
        assert program.step().global_batch == 32


def test_where_sizes_stay_workers_do_too():
    with problems.build(descend, jnp.zeros(()), data_of(), 12, world=LocalWorld(4, workers=2)) as program:
        with pytest.raises(ad.BatchSizeError, match="resizable=False"):
            program.rescale(workers=3)
        assert program.step().members == (0, 1)


@pytest.mark.parametrize("asked", [2, 1])
def test_in_a_fixed_world_a_request_for_workers_is_noted(asked):
    def driver(state, batch):
        ctrl.hook(lambda control: control.rescale(workers=asked))
        return descend(state, batch)

    with build(driver, jnp.zeros(()), data_of(), 12, world=comm.SoloWorld()) as program:
        notes = program.step().notes
        assert notes == ("hook '<lambda>': workers 2 clipped to 1, the most available.",) * (asked == 2)
        assert program.step().members == (0,)
        with pytest.raises(ad.WorkerCountError, match="1 is"):
            program.rescale(workers=2)


def test_a_broadcasting_worker_does_not_leave(kind):
    def driver(state, batch):
        return state + comm.all_reduce(batch["x"].mean()), {"first": comm.broadcast(batch["x"].mean(), root=1)}

    with build(driver, jnp.zeros(()), data_of(), 12, world=world_of(kind, 3)) as program:
        with pytest.raises(ad.WorkerCountError, match="2 to 4 are"):
            program.rescale(workers=1)
        program.rescale(workers=2)
        assert program.step().members == (0, 1)


def test_a_checkpoint_with_no_number_of_workers_is_refused():
    with problems.build(descend, jnp.zeros(()), data_of(), 12, world=LocalWorld(2)) as program:
        kept = program.checkpoint()
        for wrong in (-1, 1.5, "3", None):
            with pytest.raises(ad.CheckpointError, match="workers"):
                program.restore({**kept, "workers": wrong})


def test_a_record_has_the_requests(tmp_path):
    def driver(state, batch):
        ctrl.hook(lambda control: control.rescale(workers=4 - control.step))
        return descend(state, batch)

    path = tmp_path / "trace.jsonl"
    with build(driver, jnp.zeros(()), data_of(), 12, world=LocalWorld(4, workers=2)) as program:
        list(program.run(steps=3, record=path))
    lines = [json.loads(line) for line in path.read_text().splitlines()][1:]
    assert [line["decision"]["workers"] for line in lines] == [3, 2, 1]
    assert [line["asked"]["workers"] for line in lines] == [[2, 1, 4], [3, 1, 4], [2, 1, 4]]
    assert [line["members"] for line in lines] == [[0, 1], [0, 1, 2], [0, 1]]


def test_skipped_steps_do_not_keep_anybody_from_joining():
    def driver(state, batch):
        return descend(state, {"x": jnp.where(ad.step_number() < 2, jnp.nan, batch["x"])})

    with build(driver, jnp.zeros(()), data_of(), 12, world=LocalWorld(3, workers=1), nonfinite="skip") as program:
        program.rescale(workers=2)
        assert program.step().skipped
        program.rescale(workers=3)
        report = program.step()
        assert report.skipped
        assert report.members == (0, 1, 2)
        assert not program.step().skipped
