"""Sums, gathered rows and `ad.num_workers()` mean the same workers: those that take examples in the step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm
import controllers as ctrl
from adaptive.runtime.local_world import LocalWorld

WORKER_SLOTS = 4


def data():
    return {"x": np.arange(120, dtype=np.float32)}


def counts(state, batch):
    own = jnp.asarray(ad.worker_index() * 0 + 1)  # local: each worker sends its own
    x = batch["x"].mean()
    found = {
        "workers": ad.num_workers(),
        "sum": comm.all_reduce(1, op="sum"),
        "half": comm.all_reduce(jnp.asarray(0.5, jnp.float16), op="sum"),
        "own": comm.all_reduce(own, op="sum"),
        "rows": comm.all_gather(jnp.asarray(7.0)),
        "own_rows": comm.all_gather(own.astype(jnp.float32) * 7.0),
        "numbers": comm.all_gather(3),
        "own_numbers": comm.all_gather(own * 3),
        "least": comm.all_reduce(2, op="min"),
        "most": comm.all_reduce(own * 2, op="max"),
        "mean": comm.all_reduce(jnp.asarray(4.0)),
        "worker_slots": jnp.zeros(ad.capacity()),
    }
    return state + comm.all_reduce(x), found


def check_counts(report, there):
    """All of a report's counts are of the workers that are there."""
    n, m = len(there), {name: np.asarray(value).astype(float).tolist() for name, value in report.metrics.items()}
    capacity = len(report.batch_sizes)
    assert [worker_slot for worker_slot, size in enumerate(report.batch_sizes) if size] == list(there)
    assert [m[name] for name in ("workers", "sum", "own", "least", "most", "mean")] == [n, n, n, 2, 2, 4]
    assert m["half"] == n / 2
    rows = [7.0 if worker_slot in there else np.nan for worker_slot in range(capacity)]
    np.testing.assert_array_equal(m["rows"], rows)
    np.testing.assert_array_equal(m["own_rows"], rows)
    assert m["numbers"] == m["own_numbers"] == [3.0 * (worker_slot in there) for worker_slot in range(capacity)]
    assert len(m["worker_slots"]) == capacity


def test_joining_and_leaving_workers_count_at_once_without_a_compilation():
    world = LocalWorld(WORKER_SLOTS)
    with ad.Program(counts, 0.0, data(), global_batch=20, world=world) as program:
        program.warm_up()
        report = program.step()
        check_counts(report, range(4))
        world.leave(3)
        check_counts(program.step(), (0, 1, 2))
        world.leave(0)
        check_counts(program.step(), (1, 2))
        world.join(3)
        check_counts(program.step(), (1, 2, 3))
        program.rescale(workers=4)
        program.step()
        last = program.step()
        check_counts(last, range(4))


def test_a_worker_whose_share_is_zero_takes_no_part():
    world = LocalWorld(WORKER_SLOTS)
    with ad.Program(counts, 0.0, data(), global_batch=18, shares=(1, 0, 5, 1), world=world) as program:
        program.warm_up()
        check_counts(program.step(), (0, 2, 3))
        for shares, there in (((0, 0, 3, 0), (2,)), ((1, 1, 1, 1), range(WORKER_SLOTS))):
            program.rescale(shares=shares)
            program.step()
            check_counts(program.step(), there)


def test_the_number_of_workers_may_gate_a_message_and_reach_a_hook():
    seen = []

    def driver(state, batch):
        ctrl.hook(lambda control, n: seen.append((int(n), control.workers, control.capacity)), ad.num_workers())
        own = (ad.worker_index() * 0).astype(jnp.float32) + 1.0
        own = comm.all_reduce(own, op="sum", when=ad.num_workers() > 2)
        return state + comm.all_reduce(batch["x"].mean()), {"s": comm.all_gather(own)}

    world = LocalWorld(4)
    with ad.Program(driver, 0.0, data(), global_batch=12, world=world) as program:
        assert np.asarray(program.step().metrics["s"]).tolist() == [4.0] * 4
        world.leave(0)
        world.leave(3)
        assert np.asarray(program.step().metrics["s"])[1:3].tolist() == [1.0] * 2
    assert seen == [(4, 4, 4), (2, 2, 4)]


def test_outside_a_program_workers_counts_members():
    world = comm.DeviceWorld(jax.local_devices()[:4])
    with world:
        world.leave(1)
        assert (int(ad.num_workers()), ad.capacity()) == (3, 4)
        assert float(comm.all_reduce(1.0, op="sum")) == 3
        np.testing.assert_array_equal(comm.all_gather(2.0), [2, np.nan, 2, 2])
