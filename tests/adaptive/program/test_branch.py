"""A branch leaves no trace: the run continues as without it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import make_data, mean_loss
from tests.threaded_world import Job

W = np.array([0.3, -0.2, 0.1], np.float32)


def build(seen=None, **options):
    """A program of two workers with operator state, a hyperparameter, local state, a policy and a hook function."""

    def watch(control, loss):
        if seen is not None:
            seen.append(control.step)

    def halve(observation, calls):
        lr = 0.1 * 0.5 ** (int(calls) // 4)
        return (ad.Decision(hyperparameters={"lr": lr}) if observation.due else None), calls + 1

    def driver(state, batch):
        lr = ad.hyperparameter("lr", 0.1)
        loss, grads = jax.value_and_grad(mean_loss)(state["w"], batch)
        loss = mon.ema(comm.all_reduce(loss))
        ctrl.hook(watch, loss)
        ctrl.hook(ctrl.Policy(lambda n: np.asarray(0), halve, "halve"), every=2)
        ctrl.hook(lambda control: control.rescale(global_batch=5 + control.step // 3), every=3, name="grow")
        w = state["w"] - lr * comm.all_reduce(grads)
        return {"n": state["n"] + 1, "w": w, "own": state["own"] + loss}, {"loss": loss, "lr": lr}

    options = {"global_batch": 5, "world": LocalWorld(2), "deterministic": True, **options}
    state = {"n": 0, "w": W, "own": np.zeros(())}
    return ad.Program(driver, state, make_data(24), per_worker_state=lambda s: s["own"], **options)


def course(program, steps):
    found = [program.step() for _ in range(steps)]
    return [(r.step, r.examples, r.batch_sizes, float(r.metrics["loss"]), float(r.metrics["lr"])) for r in found]


def same(first, second):
    """Whether two checkpoints are equal to the bit."""
    alike = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), first, second)
    return all(jax.tree.leaves(alike))


def test_a_program_continues_as_without_the_branch():
    seen, events = [], []
    with build() as plain, build(seen) as program:
        expected = course(plain, 12)
        found = course(program, 4)
        before, batch_sizes = program.checkpoint(), program.batch_sizes
        with program.subscribe(events.append), program.branch(global_batch=12, lr=0.5):
            reports = [program.step() for _ in range(5)]
            assert program.steps == 9
        assert [r.global_batch for r in reports] == [12] * 5
        assert [float(r.metrics["lr"]) for r in reports] == [0.5] * 5
        assert (seen, events) == ([1, 2, 3, 4], [])  # no hook ran
        assert program.batch_sizes == batch_sizes
        assert same(before, program.checkpoint())
        found += course(program, 8)
        assert found == expected
        assert same(plain.checkpoint() | {"run_id": 0}, program.checkpoint() | {"run_id": 0})


def test_branches_within_a_run_and_before_it():
    with build() as plain, build() as program:
        with program.branch(global_batch=8):
            first = course(program, 2)
        with program.branch(global_batch=8):
            assert course(program, 2) == first  # the same examples, from the same state
            with program.branch(lr=0.0):
                assert course(program, 1)[0][-1] == 0.0
        losses = []
        for report in program.run(steps=4):
            losses.append(float(report.metrics["loss"]))
            with program.branch(lr=0.0):
                program.step()
        assert losses == [row[3] for row in course(plain, 4)]


@pytest.fixture(scope="module")
def standing():
    with build() as program:
        program.step()
        yield program


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"global_batch": 1}, ad.BatchSizeError, "too small for 2 workers"),
        ({"momentum": 0.9}, ad.DriverError, "no hyperparameter 'momentum'"),
        ({"lr": float("nan")}, ad.DriverError, "not finite"),
        ({"lr": 3e38}, ad.NonFiniteError, "infinities"),
    ],
)
def test_impossible_values_are_refused_and_change_nothing(standing, arguments, error, message):
    before = standing.checkpoint()
    with pytest.raises(error, match=message), standing.branch(**arguments):
        course(standing, 20)
    assert same(before, standing.checkpoint())
    assert standing.hyperparameters["lr"] == pytest.approx(0.1)


def test_iterators_go_back_to_where_they_stood():
    def driver(state, batch):
        mean = comm.all_reduce(jnp.mean(batch["x"]))
        return state + mean, {"mean": mean}

    data = ad.data.from_iterator(lambda: ({"x": np.float32(i)} for i in range(40)), length=40)
    with ad.Program(driver, jnp.zeros(()), data, global_batch=4) as program:
        program.step()
        with program.branch(global_batch=8):
            assert float(program.step().metrics["mean"]) == np.arange(4, 12).mean()
        assert float(program.step().metrics["mean"]) == np.arange(4, 8).mean()


NUMBERED = {"x": np.arange(60, dtype=np.float32), "number": np.arange(60)}


def count(state, batch):
    """Count how often each example was used, and sum the means of the batches."""
    used = comm.all_reduce(jnp.zeros(60, jnp.int32).at[batch["number"]].add(1), op="sum")
    return {"used": state["used"] + used, "sum": state["sum"] + comm.all_reduce(batch["x"].mean())}, {}


def test_only_workers_lost_in_a_branch_are_missing_after_it():
    def script(world):
        state = {"used": jnp.zeros(60, jnp.int32), "sum": jnp.zeros(())}
        with ad.Program(count, state, NUMBERED, global_batch=12, world=world, seed=3) as program:
            program.step()
            mark = len(world.job.operations[0])
            with program.branch(global_batch=18):
                program.step()
                program.step()
            left = len(world.job.operations[0])
            assert program.steps == 1
            for _ in range(4):
                assert program.step().global_batch == 12
            return program.state, program.members, (mark, left)

    calm = Job(3).run(script)
    expected, _, (mark, left) = calm[0]
    assert np.array_equal(expected["used"], np.ones(60))  # the branch's examples came again
    assert left - mark >= 2  # both steps
    survivors = Job(3, {2: left - 1}).run(script)
    assert sorted(survivors) == [0, 1]
    state, members, _ = survivors[0]
    assert members == (0, 1)
    np.testing.assert_array_equal(state["used"], expected["used"])
    np.testing.assert_allclose(state["sum"], expected["sum"], rtol=1e-6)


def test_workers_that_read_each_others_parameters_do_not_read_those_of_a_branch():
    """A publication is of a step, and a branch has steps of the same numbers as those after it."""

    def driver(w, batch):
        lr = ad.hyperparameter("lr", 0.01)
        return comm.asynchronous_mean(w) - lr * jnp.ones_like(w), {"x": comm.all_reduce(batch["x"].mean())}

    state, world = np.zeros(3, np.float32), LocalWorld(2)
    with ad.Program(driver, state, make_data(24), global_batch=4, world=world, per_worker_state=lambda w: w) as program:
        program.step()
        with program.branch(lr=1e6):
            for _ in range(3):
                program.step()
            assert abs(np.asarray(program.state)).min() > 1e6
        for _ in range(3):
            program.step()
        assert abs(np.asarray(program.state)).max() < 0.1
