"""One driver on two and on three MPI ranks: equal states, monitors, checkpoints, and ranks that join and leave.

All ranks run a test together; see tests/ranks.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import collectives.strategies as sync
import controllers as ctrl
import monitors as mon

from .problem import (
    COUNTED,
    DATA,
    RATE,
    START,
    check_counted,
    check_descent,
    descend,
    descend_and_count,
    mean_loss,
    one_worker,
    taken,
)

pytestmark = pytest.mark.ranks
on_two, on_three = pytest.mark.on_ranks(2), pytest.mark.on_ranks(3)


@pytest.fixture
def folder(tmp_path) -> Path:
    """One that all ranks see."""
    with comm.world() as world:
        return Path(world.all_gather_bytes(str(tmp_path).encode())[0].decode())


def alike(value: object) -> bool:
    """Whether an array is the same on all ranks, to the last bit."""
    rows = np.asarray(comm.all_gather(jnp.asarray(value)))
    return bool((rows == rows[0]).all())


def raised_by(function: Callable) -> Exception | None:
    """The error that a function raises."""
    try:
        function()
    except Exception as error:
        return error
    return None


def build(driver=descend, state=START, **options) -> ad.Program:
    return ad.Program(driver, state, DATA, **{"global_batch": 12, "deterministic": True, **options})


def step_like_one_worker(n: int) -> None:
    sizes = {2: (11, 4), 3: (5, 9, 1)}[n]
    with comm.world() as world, build(shares=[1, 3, 2][:n], microbatch=3) as program:
        assert (world.size, world.processes) == (n, n)
        reports = list(program.run(steps=3))
        program.rescale(global_batch=15, shares=sizes)
        reports += program.run(steps=3)
        assert reports[-1].batch_sizes == sizes
        check_descent(program.state, reports)
        assert alike(program.state)
        np.testing.assert_allclose(program.state, one_worker([12] * 3 + [15] * 3)[0], rtol=0, atol=1e-12)


@on_two
def test_two_ranks_step_like_one_worker():
    step_like_one_worker(2)


@on_three
def test_three_ranks_step_like_one_worker():
    step_like_one_worker(3)


@on_two
def test_monitors_and_hooks_share_the_gradients_message():
    def adapt(control, noise, seconds):
        control.barrier()
        control.rescale(global_batch=np.clip(noise.scale, 6, 24))
        control.barrier()

    def driver(w, batch):
        grads = jax.grad(mean_loss)(w, batch)
        avg_grads = comm.all_reduce(grads)
        noise, seconds = mon.noise_scale(grads, avg_grads), comm.all_gather(mon.compute_seconds())
        ctrl.hook(adapt, noise, seconds, every=2)
        return w - RATE * avg_grads, {"loss": comm.all_reduce(mean_loss(w, batch)), "taken": taken(batch)}

    with comm.world(), build(driver, microbatch=2) as program:
        reports = list(program.run(steps=6))
        check_descent(program.state, reports)
        assert {report.messages for report in reports} == {1}
        assert len({report.global_batch for report in reports}) > 1
        assert alike([report.global_batch for report in reports])


@on_two
def test_a_barrier_waits_for_all(folder):
    path = folder / "barrier"
    with comm.world() as world:
        if world.rank == 0:
            time.sleep(0.3)
            path.write_text("here")
        world.barrier()
        assert path.read_text() == "here"


@on_two
def test_hooks_that_decide_differently_are_found_before_the_next_update():
    with comm.world() as world:

        def differs(control):
            control.rescale(global_batch=12 + 6 * world.rank)

        def driver(w, batch):
            ctrl.hook(differs, every=2)
            return descend(w, batch)

        with build(driver) as program:
            reports = [program.step(), program.step()]
            error = raised_by(program.step)
            assert isinstance(error, ad.DisagreementError)
            assert "differs" in str(error)  # names the hook
            check_descent(program.state, reports)


@on_two
def test_an_error_on_one_rank_is_raised_on_all():
    with comm.world() as world:

        def fails(control):
            if control.step == 2 and world.rank == 1:
                raise OSError("no space left")

        def driver(w, batch):
            ctrl.hook(fails)
            return descend(w, batch)

        with build(driver) as program:
            error = raised_by(lambda: list(program.run(steps=5)))
            assert isinstance(error, OSError if world.rank == 1 else ad.WorkerError)
            assert "no space left" in str(error)
        world.barrier()


@on_two
def test_nans_of_one_rank_are_raised_on_all():
    def driver(w, batch):
        bad = (ad.worker_index() == 1) & (ad.step_number() == 1)
        return descend(w, {**batch, "y": jnp.where(bad, jnp.nan, batch["y"])})

    with comm.world(), build(driver) as program:
        reports = [program.step()]
        assert isinstance(raised_by(program.step), ad.NonFiniteError)
        check_descent(program.state, reports)


@on_two
def test_rounds_in_four_bits():
    options = {"optimizer": optax.sgd(RATE), "steps": 2}
    with comm.world():
        models = []
        for strategy in (sync.local_steps(**options), sync.local_steps(**options, wire="4bit")):

            def driver(state, batch, strategy=strategy):
                state, loss = strategy.step(state, jax.value_and_grad(mean_loss), batch)
                return state, {"loss": comm.all_reduce(loss)}

            state = strategy.init(jnp.asarray(START))
            with build(driver, state, per_worker_state=strategy.per_worker_state, resizable=False) as program:
                for _ in program.run(steps=20):
                    pass
                models.append(np.asarray(strategy.model(program.state)))
                assert alike(models[-1])
        moved = np.linalg.norm(models[0] - START)
        assert 0 < np.linalg.norm(models[1] - models[0]) < 0.1 * moved


def save_a_checkpoint(folder: Path, **options) -> None:
    with comm.world(**options), build(descend_and_count, COUNTED, resizable=False) as program:
        for _ in program.run(steps=4, checkpoint=ad.Checkpoints(folder / "run", every=3)):
            pass
        check_counted(program.state, [12] * 4)


@on_two
def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(folder):
    save_a_checkpoint(folder)
    with build(descend_and_count, COUNTED, world=comm.SoloWorld(), resizable=False) as program:
        program.restore(folder / "run")
        assert program.steps == 4
        program.step()
        check_counted(program.state, [12] * 5)


@on_three
def test_a_checkpoint_of_two_ranks_goes_on_with_three(folder):
    save_a_checkpoint(folder, workers=2)
    with comm.world(), build(descend_and_count, COUNTED, resizable=False) as program:
        program.restore(folder / "run")
        assert program.steps == 4
        assert all(report.batch_sizes == (4, 4, 4) for report in program.run(steps=2))
        check_counted(program.state, [12] * 6)
        found = program.evaluate(lambda state, batch: mean_loss(state["w"], batch), DATA, batch=7)
        np.testing.assert_allclose(found, mean_loss(np.asarray(program.state["w"]), DATA), rtol=1e-12)


@on_three
def test_a_rank_in_reserve_joins_and_ranks_leave_again():
    """Two, three, one: by requests of a hook. Steps go on meanwhile, on the same examples."""

    def adapt(control):
        if control.step == 3:
            control.rescale(workers=3)
        elif control.workers == 3:
            control.rescale(workers=1)
        elif control.workers == 1:
            control.stop()

    def driver(state, batch):
        ctrl.hook(adapt)
        return descend_and_count(state, batch)

    with comm.world(workers=2) as world:
        assert (world.size, world.capacity) == (2, 3)
        with build(driver, COUNTED, deterministic=False) as program:
            members = []
            for report in program.run(steps=5000):
                members.append(report.members)
                time.sleep(0.002)
            check_counted(program.state, [12] * program.steps)
            assert 4 < program.steps < 5000
            if world.workers[0] == 0:  # the only one that has seen all steps
                assert set(members) == {(0, 1), (0, 1, 2), (0,)}
                assert members[:3] == [(0, 1)] * 3
            assert program.members == (0,)


@on_three
def test_a_quorum_does_not_wait_for_a_late_rank():
    """The last rank needs 50 times as long for a local step, and is counted once it has taken all of its steps."""
    strategy = sync.quorum(optax.sgd(RATE), optax.sgd(1.0), steps=6, quorum=2)
    with comm.world() as world:
        is_late = world.rank == 2

        def sleep(loss):
            time.sleep(0.15 if is_late else 0.002)
            return np.asarray(loss)

        def value_and_grad(w, batch):
            loss, grads = jax.value_and_grad(mean_loss)(w, batch)
            return jax.pure_callback(sleep, jax.ShapeDtypeStruct((), loss.dtype), loss), grads

        def driver(state, batch):
            state, _ = strategy.step(state, value_and_grad, batch)
            return state, {}

        state, counted = strategy.init(jnp.asarray(START)), []
        options = {"per_worker_state": strategy.per_worker_state, "global_batch": 36, "resizable": False}
        with build(driver, state, deterministic=False, **options) as program:
            for _ in program.run(steps=12):
                counted.append(int(program.state.counted))
                assert alike(strategy.model(program.state))
    assert {2, 3} <= set(counted), counted
