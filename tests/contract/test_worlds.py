"""One driver in all worlds: one worker, devices of one process, members of a world, processes of `jax.distributed`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl

from .problem import (
    COUNTED,
    DATA,
    EXAMPLES,
    START,
    check_counted,
    check_descent,
    check_epochs,
    descend,
    descend_and_count,
    one_run,
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


def test_an_order_of_examples_belongs_to_a_seed_and_each_epoch_has_its_own():
    _, first = one_worker([12] * 8)
    _, again = one_run.__wrapped__((12,) * 8, 0)
    _, other = one_worker([12] * 8, seed=1)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first[:4], first[4:])
    for steps in (first[:4], first[4:], other[:4]):
        check_epochs(steps)
        assert (np.sum(steps, axis=0) == 1).all()


def test_data_of_other_kinds_give_the_same_examples():
    class Source:
        def __len__(self):
            return EXAMPLES

        def __getitem__(self, index):
            return {name: leaf[index] for name, leaf in DATA.items()}

    def run(data):
        with ad.Program(descend, START, data, global_batch=12, world=comm.SoloWorld(), resizable=False) as program:
            reports = list(program.run(epochs=2))
            check_descent(program.state, reports)
            return [report.metrics["taken"] for report in reports]

    np.testing.assert_array_equal(run(DATA), run(Source()))
    in_order = run(ad.data.from_iterator(lambda: (Source()[index] for index in range(EXAMPLES))))
    np.testing.assert_array_equal(in_order[0], np.arange(EXAMPLES) < 12)


def test_shards_are_read_by_their_own_worker(devices):
    shards = [{name: leaf[worker::3] for name, leaf in DATA.items()} for worker in range(3)]

    def driver(w, batch):
        w, metrics = descend(w, batch)
        return w, {**metrics, "ids": comm.all_gather(batch["id"])}

    with ad.Program(driver, START, ad.Shards(shards), global_batch=12, world=devices, resizable=False) as program:
        reports = list(program.run(steps=4))
        check_descent(program.state, reports)
    for report in reports:
        np.testing.assert_array_equal(report.metrics["ids"] % 3, np.arange(3)[:, None] * np.ones((1, 4), int))


def test_workers_join_and_leave_and_count_while_they_are_there():
    with comm.DeviceWorld(jax.local_devices()[:3], workers=2) as world:

        def driver(state, batch):
            state, metrics = descend_and_count(state, batch)
            return state, {**metrics, "workers": comm.all_reduce(1, op="sum"), "rows": comm.all_gather(1.0)}

        with ad.Program(driver, COUNTED, DATA, global_batch=12, world=world, deterministic=True) as program:
            reports = [program.step()]
            for workers in (3, 1, 3):
                program.rescale(workers=workers)
                for _ in range(2000):
                    reports.append(program.step())
                    if len(reports[-1].members) == workers:
                        break
            check_counted(program.state, [12] * len(reports))
    numbers = [len(report.members) for report in reports]
    assert (numbers[0], numbers[-1]) == (2, 3)
    assert set(numbers) == {1, 2, 3}
    for report in reports:
        assert int(report.metrics["workers"]) == len(report.members)
        present = np.isfinite(np.asarray(report.metrics["rows"], float))
        np.testing.assert_array_equal(np.flatnonzero(present), report.members)


def test_a_joining_worker_begins_with_the_initial_state_of_its_own():
    def driver(state, batch):
        w, metrics = descend(state["w"], batch)
        own = state["own"] + comm.local_mean(batch["y"].mean() * 0 + 1)
        return {"w": w, "own": own}, {**metrics, "own": comm.all_gather(own)}

    state = {"w": START, "own": jnp.zeros(())}
    options = {"per_worker_state": lambda state: state["own"], "deterministic": True}
    world = comm.DeviceWorld(jax.local_devices()[:2])
    with world, ad.Program(driver, state, DATA, global_batch=12, world=world, **options) as program:
        reports = [program.step(), program.step()]
        program.rescale(workers=1)
        reports.append(program.step())
        program.rescale(workers=2)
        while len(reports[-1].members) < 2 and len(reports) < 2000:
            reports.append(program.step())
        reports.append(program.step())
        check_descent(program.state["w"], reports)
    steps = len(reports)
    np.testing.assert_array_equal(reports[1].metrics["own"], [2, 2])
    np.testing.assert_array_equal(reports[-1].metrics["own"], [steps, 2])


def test_a_request_for_more_workers_than_there_are_is_clipped_with_a_note(devices):
    def adapt(control):
        control.rescale(workers=control.most_workers + 5)

    def driver(w, batch):
        ctrl.hook(adapt, every=2)
        return descend(w, batch)

    with ad.Program(driver, START, DATA, global_batch=12, world=devices) as program:
        reports = [program.step() for _ in range(3)]
        assert program.target_workers == 3
    assert any("3" in note for note in reports[1].notes)


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
