"""Policies at work in a program: from what a step measures to the sizes of the next."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from adaptive import operators
from adaptive.runtime.local_world import LocalWorld

from .problems import build, descend, make_data, same_everywhere

COVERS = ("controllers/_hook.py",)


def emulated_seconds(milliseconds: jax.Array) -> jax.Array:
    """Seconds that the previous step would have taken, on workers of known speed: as `mon.compute_seconds()`."""
    size, mine = ad.batch_size().astype(jnp.float32), milliseconds[ad.worker_index()]
    previous = operators.operator_state("previous size", np.float32(np.nan), lambda before: (size, before))
    return 1e-3 * (2.0 + mine * previous)


def test_balance_gives_each_worker_examples_by_its_speed(workers, free_calls):
    """Of known speeds, so that the ideal split is known; real ones are measured in the benchmarks."""
    n = workers.size
    milliseconds = np.array([0.1, 0.4, 0.2, 0.1, 0.3])[:n]

    def driver(state, batch):
        seconds = comm.all_gather(emulated_seconds(jnp.asarray(milliseconds, jnp.float32)))
        ctrl.hook(ctrl.balance(), seconds, every=5)
        state, metrics = descend(state, batch)
        return state, {**metrics, "seconds": seconds}

    with build(driver, 0.0, make_data(320), 96, world=workers, resizable=True) as program:
        program.warm_up()
        reports = list(program.run(steps=31))
    assert same_everywhere(workers, [r.batch_sizes for r in reports])
    assert {r.global_batch for r in reports} == {96}
    assert reports[0].batch_sizes == (96 // n,) * n
    assert np.isnan(reports[0].metrics["seconds"]).all()
    ideal = 2.0 + 96 / np.sum(1 / milliseconds)
    slowest = [(2.0 + milliseconds * np.array(r.batch_sizes)).max() for r in reports]
    assert slowest[0] > 1.2 * ideal
    assert slowest[-1] < 1.05 * ideal
    adjustments = [r.step for r in reports if r.decision]
    assert 1 <= len(adjustments) <= 2
    assert any("slowest worker expected at" in note for r in reports for note in r.notes)


def test_real_seconds_reach_the_policy(world):
    """Measured ones, of which no more is known than that they are positive, each the one before's."""
    seen = []

    def watch(control, seconds, iteration):
        seen.append((np.array(seconds), float(iteration)))

    def driver(state, batch):
        seconds = comm.all_gather(mon.compute_seconds())
        ctrl.hook(watch, seconds, comm.all_reduce(mon.iteration_seconds(), op="max"))
        return descend(state, batch)

    with build(driver, 0.0, make_data(), 24, world=world) as program:
        reports = list(program.run(steps=4))
    assert np.isnan(seen[0][0]).all()
    for (seconds, iteration), before in zip(seen[1:], reports[:-1], strict=True):
        assert seconds.shape == (world.size,)
        assert (seconds > 0).all()
        assert (seconds < iteration).all()
        mine = [seconds[w] for w in world.workers]
        np.testing.assert_allclose(mine, before.compute_seconds, rtol=1e-6)
    assert same_everywhere(world, [s for s, _ in seen[1:]])


def linear_problem(examples: int, scale: float, dimensions: int = 100) -> tuple[dict, float]:
    """Gradients that do not depend on the parameters, drawn around (1, 0, 0, …): their noise scale is known."""
    x = np.random.default_rng(0).normal(size=(examples, dimensions)) * np.sqrt(scale / dimensions)
    x[:, 0] += 1
    mean = x.mean(0)
    return {"x": x.astype(np.float32)}, float(((x - mean) ** 2).sum() / (examples - 1) / (mean @ mean))


@pytest.mark.parametrize("kind", ["local", pytest.param("devices", marks=pytest.mark.long)])
def test_noise_workers_requests_workers_by_the_noise_scale(kind):
    """Listing 1 as printed, from one worker on: peers are the noise over the batch of each."""
    data, truth = linear_problem(4096, scale=100.0)
    world = LocalWorld(4, workers=1) if kind == "local" else comm.DeviceWorld(workers=1)
    each = int(truth / 2.6)

    def driver(params, batch):
        grads = jax.grad(lambda p: (batch["x"] @ p).mean())(params)
        average = comm.all_reduce(grads)
        noise = mon.noise_scale(grads, average)
        ctrl.hook(ctrl.noise_workers(each), noise, every=10)
        return params - 0.01 * average, noise

    options = {"resizable": True, "deterministic": True}
    with build(driver, jnp.zeros(100), data, each, world=world, **options) as program:
        program.warm_up()
        reports = list(program.run(steps=120))
    numbers = [len(r.members) for r in reports]
    assert numbers[0] == 1
    assert 2 <= numbers[-1] <= 3
    assert reports[-1].global_batch == each * numbers[-1]
    assert any("the noise scale is" in note for r in reports for note in r.notes)


@pytest.mark.parametrize("kind", ["devices", pytest.param("local", marks=pytest.mark.long)])
def test_goodput_workers_handles_joining_and_leaving_workers(kind):
    """By seconds that are measured, of which no more is known than that they are positive."""
    world = LocalWorld(4, workers=2) if kind == "local" else comm.DeviceWorld(workers=2)

    def driver(state, batch):
        seconds = comm.all_gather(mon.compute_seconds())
        iteration = comm.all_reduce(mon.iteration_seconds(), op="max")
        ctrl.hook(ctrl.goodput_workers(max_batch=64), jnp.float32(200.0), seconds, iteration, every=5)
        return descend(state, batch)

    rng = np.random.default_rng(0)
    with build(driver, 0.0, make_data(), 24, world=world, resizable=True) as program:
        program.warm_up()
        for step in range(60):
            if step % 7 == 3:
                program.rescale(workers=int(rng.integers(1, 5)))
            report = program.step()
            assert report.global_batch <= 64
        kept = program.checkpoint()
        program.restore(kept)
        assert program.step().members == tuple(range(program.target_workers))


def test_hooks_share_one_decision(world):
    """Of two hooks of a barrier, the later sees the requests of the earlier; both are in force in the next step."""
    saw = []

    def batch(control):
        control.rescale(global_batch=40)

    def split(control):
        saw.append(control.global_batch)
        control.rescale(shares=[2.0] + [1.0] * (control.capacity - 1))

    def driver(state, batch_):
        ctrl.hook(batch, every=2)
        ctrl.hook(split, every=2)
        return descend(state, batch_)

    with build(driver, 0.0, make_data(), 16, world=world, resizable=True) as program:
        program.warm_up()
        reports = [program.step() for _ in range(3)]
    assert saw == [40]
    assert reports[0].decision is None
    assert (reports[1].decision.global_batch, len(reports[1].decision.shares)) == (40, world.size)
    sizes = reports[2].batch_sizes
    assert sum(sizes) == 40
    assert world.size == 1 or sizes[0] == pytest.approx(2 * sizes[1], abs=2)


def test_hooks_get_numpy_arrays_and_numbers(world):
    """Pytrees of numpy arrays and scalars, as they left the driver."""
    given = []

    def look(control, tree, pair):
        given.append((control.step, control.epoch, control.capacity, control.batch_sizes, tree, pair))

    def driver(state, batch):
        state, metrics = descend(state, batch)
        noise = mon.NoiseScale(*[metrics["loss"]] * 5)
        ctrl.hook(look, {"loss": metrics["loss"], "flag": jnp.array(True)}, (noise, jnp.arange(3)), every=2)
        return state, metrics

    with build(driver, 0.0, make_data(), 32, world=world) as program:
        reports = [program.step() for _ in range(4)]
    assert [step for step, *_ in given] == [2, 4]
    for (step, epoch, workers, sizes, tree, (noise, numbers)), report in zip(given, reports[1::2], strict=True):
        assert epoch == step * 32 / 160
        assert (workers, sizes) == (world.size, report.batch_sizes)
        assert isinstance(tree["loss"], np.floating)
        assert tree["loss"] == report.metrics["loss"] == noise.scale
        assert tree["flag"] is np.True_
        assert isinstance(noise, mon.NoiseScale)
        assert numbers.tolist() == [0, 1, 2]
