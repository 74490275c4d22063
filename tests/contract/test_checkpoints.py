"""Checkpoints of whole programs: on any number of workers, and bit for bit; tests/adaptive/program has the rest."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon

from .problem import DATA, START, check_descent, descend, mean_loss, one_worker, taken


def world_of(n: int):
    return comm.SoloWorld() if n == 1 else comm.DeviceWorld(jax.local_devices()[:n])


def build(world, driver=descend, state=START, **options) -> ad.Program:
    options = {"global_batch": 12, "world": world, "deterministic": True, "resizable": False, **options}
    return ad.Program(driver, state, DATA, **options)


def test_a_program_goes_on_with_any_number_of_workers(tmp_path):
    """Three workers, then one, then two: the state and the examples are those of one worker throughout."""
    reports = []
    for number in (3, 1, 2):
        with world_of(number) as world, build(world) as program:
            program.restore(tmp_path / "run", missing_ok=True)
            assert program.steps == len(reports)
            reports += program.run(steps=3, checkpoint=ad.Checkpoints(tmp_path / "run", every=2))
            check_descent(program.state, reports)
            w = np.asarray(program.state)
    state, examples = one_worker([12] * 9)
    np.testing.assert_allclose(w, state, rtol=0, atol=1e-12)
    np.testing.assert_array_equal([report.metrics["taken"] for report in reports], examples)


def test_a_checkpoint_is_the_whole_program_bit_for_bit(devices):
    """State, averages of monitors, state of policies, hyperparameters, sizes, and the position in the data."""

    def grow(control):
        control.rescale(global_batch=12 + control.step)
        control.set_hyperparameters(lr=0.1 / control.step)

    def driver(w, batch):
        grads = jax.grad(mean_loss)(w, batch)
        avg_grads = comm.all_reduce(grads)
        noise = mon.noise_scale(grads, avg_grads)
        ctrl.hook(ctrl.noise_batch(max_batch=40), noise, every=3)
        ctrl.hook(grow, every=4)
        return w - ad.hyperparameter("lr", 0.1) * avg_grads, {"noise": noise, "taken": taken(batch)}

    def run_on(program):
        reports = [program.step() for _ in range(5)]
        metrics = jax.tree.map(np.asarray, [report.metrics for report in reports])
        sizes = [report.batch_sizes for report in reports]
        return metrics, sizes, [float(report.hyperparameters["lr"]) for report in reports], np.asarray(program.state)

    with build(devices, driver, resizable=True) as program:
        for _ in range(4):
            program.step()
        kept = program.checkpoint()
        went_on = run_on(program)
    with build(devices, driver, resizable=True) as program:
        program.restore(kept)
        restored = run_on(program)
    assert jax.tree.structure(went_on) == jax.tree.structure(restored)
    for one, other in zip(jax.tree.leaves(went_on), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(one, other)


def test_state_of_each_worker_is_restored_on_as_many_workers_or_by_request():
    def driver(state, batch):
        own = comm.local_mean(batch["y"].mean())
        w, metrics = descend(state["w"], batch)
        return {"w": w, "own": state["own"] + own}, {**metrics, "own": comm.all_gather(state["own"] + own)}

    state = {"w": START, "own": np.zeros(())}
    options = {"driver": driver, "state": state, "per_worker_state": lambda state: state["own"]}
    with world_of(2) as world, build(world, **options) as program:
        program.step()
        kept = program.checkpoint()
        went_on = program.step()
    with world_of(2) as world, build(world, **options) as program:
        program.restore(kept)
        np.testing.assert_array_equal(program.step().metrics["own"], went_on.metrics["own"])
    with world_of(3) as world, build(world, **options) as program:
        with pytest.raises(ad.CheckpointError):
            program.restore(kept)
        program.restore(kept, other_workers_ok=True)
        program.step()
        np.testing.assert_allclose(program.state["w"], one_worker([12] * 2)[0], rtol=0, atol=1e-12)
