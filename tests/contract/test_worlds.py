"""One driver in all worlds: one worker, devices of one process, members of a world, processes of `jax.distributed`."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import adaptive as ad
import collectives as comm

from .problem import (
    COUNTED,
    DATA,
    START,
    check_counted,
    check_descent,
    descend,
    descend_and_count,
    one_worker,
)


def test_the_world_follows_from_where_the_program_runs():
    with comm.world() as world:
        assert isinstance(world, comm.DeviceWorld)
        assert (world.size, world.rank) == (len(jax.local_devices()), 0)
    with comm.world(devices=jax.local_devices()[:1]) as world:
        assert isinstance(world, comm.SoloWorld)
        assert world.size == 1


@pytest.mark.parametrize("n", [1, 2, 4])
def test_every_number_of_devices_has_the_state_of_one_worker(n):
    with comm.world(devices=jax.local_devices()[:n]) as world:
        program = ad.Program(descend, START, DATA, global_batch=12, world=world, deterministic=True)
        with program:
            reports = [program.step(), program.step()]
            sizes = {1: (15,), 2: (11, 4), 4: (1, 7, 2, 5)}[n]
            program.rescale(global_batch=15, shares=sizes)
            reports += [program.step(), program.step()]
            assert reports[-1].batch_sizes == sizes
            check_descent(program.state, reports)
            np.testing.assert_allclose(program.state, one_worker([12, 12, 15, 15])[0], rtol=0, atol=1e-12)


def test_workers_join_and_leave_and_count_while_they_are_there():
    """And one that joins begins with the initial value of its own state."""
    with comm.DeviceWorld(jax.local_devices()[:3], workers=2) as world:

        def driver(state, batch):
            counted, metrics = descend_and_count(state["counted"], batch)
            own = state["own"] + comm.local_mean(1 + 0 * batch["y"].mean())
            metrics |= {"workers": comm.all_reduce(1, op="sum"), "rows": comm.all_gather(1.0)}
            return {"counted": counted, "own": own}, {**metrics, "own": comm.all_gather(own)}

        state = {"counted": COUNTED, "own": np.zeros(())}
        options = {"world": world, "per_worker_state": lambda state: state["own"], "deterministic": True}
        with ad.Program(driver, state, DATA, global_batch=12, **options) as program:
            reports = [program.step()]
            for workers in (3, 1, 3):
                program.rescale(workers=workers)
                for _ in range(2000):
                    reports.append(program.step())
                    if len(reports[-1].members) == workers:
                        break
            check_counted(program.state["counted"], [12] * len(reports))
    numbers = [len(report.members) for report in reports]
    assert (numbers[0], numbers[-1]) == (2, 3)
    assert set(numbers) == {1, 2, 3}
    for report in reports:
        assert int(report.metrics["workers"]) == len(report.members)
        present = np.isfinite(np.asarray(report.metrics["rows"], float))
        np.testing.assert_array_equal(np.flatnonzero(present), report.members)
    assert reports[-1].metrics["own"].tolist() == [len(reports), 1, 1]


@pytest.mark.ranks
@pytest.mark.on_ranks(2, jax=True)
def test_two_processes_that_jax_joins():
    with comm.world(devices=jax.local_devices()[:1]) as world:
        assert isinstance(world, comm.JaxWorld)
        assert (world.size, world.processes) == (2, 2)
        options = {"global_batch": 12, "deterministic": True, "microbatch": 3}
        with ad.Program(descend, START, DATA, **options) as program:
            reports = list(program.run(steps=3))  # equal batches
            program.rescale(global_batch=15, shares=[1, 2])
            reports += program.run(steps=3)
            assert reports[-1].batch_sizes == (5, 10)
            check_descent(program.state, reports)
            np.testing.assert_allclose(program.state, one_worker([12] * 3 + [15] * 3)[0], rtol=0, atol=1e-12)
