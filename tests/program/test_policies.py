"""Policies at work in a program: from what a step measures to the sizes of the next."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from adaptive import operators

from .problems import build, descend, make_data, same_everywhere

COVERS = ("controllers/_hook.py",)


def emulated_seconds(milliseconds: jax.Array) -> jax.Array:
    """Seconds that the previous step would have taken, on workers of known speed: as `mon.compute_seconds()`."""
    size, mine = ad.batch_size().astype(jnp.float32), milliseconds[ad.worker_index()]
    previous = operators.operator_state("previous size", np.float32(np.nan), lambda before: (size, before))
    return 1e-3 * (2.0 + mine * previous)


def test_balance_gives_each_worker_examples_by_its_speed(world, free_calls):
    """Of known speeds, so that the ideal split is known; real ones are measured in the benchmarks."""
    n = world.size
    milliseconds = np.array([0.1, 0.4, 0.2, 0.1, 0.3])[:n]

    def driver(state, batch):
        seconds = comm.all_gather(emulated_seconds(jnp.asarray(milliseconds, jnp.float32)))
        ctrl.hook(ctrl.balance(), seconds, every=5)
        state, metrics = descend(state, batch)
        return state, {**metrics, "seconds": seconds}

    with build(driver, 0.0, make_data(320), 96, world=world, resizable=True) as program:
        program.warm_up()
        reports = list(program.run(steps=31))
    assert same_everywhere(world, [r.batch_sizes for r in reports])
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
