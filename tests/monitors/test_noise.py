"""The noise scale as an operator: what it adds to a graph, and what it makes of steps."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive.runtime.local_world import LocalWorld
from monitors._averages import add_sample, no_samples
from monitors._noise import summary

from .lockstep import Lockstep, graph, operators, reading


def both(grads, **options):
    """As a driver would write it."""
    return mon.noise_scale(grads, comm.all_reduce(grads), **options)


def readings(sizes):
    return [reading(worker=i, examples=b, batch_size=b, global_batch=sum(sizes)) for i, b in enumerate(sizes)]


def random_steps(sizes, steps=4, seed=0, dtype=np.float32):
    """Per step and worker, the gradient of a model of two leaves."""
    rng = np.random.default_rng(seed)
    return [
        [
            ({"w": (1 + rng.standard_normal((3, 2)) / b).astype(dtype), "b": dtype(rng.standard_normal())},)
            for b in sizes
        ]
        for _ in range(steps)
    ]


def expected(steps, sizes, decay=0.95, confidence=0.95):
    """The noise scale after some steps, from its parts."""
    averages = no_samples(np.float32)
    for rows in steps:
        flat = np.array([np.append(g["w"].ravel(), g["b"]).astype(np.float64) for (g,) in rows])
        mean = np.average(flat, axis=0, weights=sizes)
        sample = mon.noise_estimate(np.float32(sizes), np.float32((flat**2).sum(1)), np.float32(mean @ mean))
        averages = add_sample(averages, jnp.stack(sample), decay)
    return summary(averages, confidence)


# --- the graph --------------------------------------------------------------------------------------------------------


def test_it_adds_three_numbers_to_the_message_and_one_slot():
    grads = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    reduced = "source examples", "all_reduce(op='mean') (2,) (3, 2)"
    assert operators(graph(comm.all_reduce, grads)) == [*reduced]
    assert operators(graph(both, grads)) == [
        *reduced,
        "source examples",
        "source microbatches",
        "all_reduce(op='sum') () () ()",
        "state noise_scale",
    ]


# --- steps ------------------------------------------------------------------------------------------------------------


def test_uneven_workers_get_the_estimate_of_all_their_steps():
    sizes = (1, 2, 5, 40)
    program, steps = Lockstep(both), random_steps(sizes)
    for t, rows in enumerate(steps):
        results = program.step(rows, readings(sizes))
        for noise in results:  # replicated
            np.testing.assert_array_equal(noise, results[0])
        np.testing.assert_allclose(results[0], expected(steps[: t + 1], sizes), rtol=2e-4)
    assert results[0].lower < results[0].scale < results[0].upper


def test_options_reach_the_estimate():
    sizes, program = (2, 6), Lockstep(lambda g: both(g, decay=0.5, confidence=0.6))
    steps = random_steps(sizes)
    noise = [program.step(rows, readings(sizes))[0] for rows in steps][-1]
    np.testing.assert_allclose(noise, expected(steps, sizes, 0.5, 0.6), rtol=2e-4)


def test_undefined_steps_keep_the_last_estimate():
    sizes = (4, 4)
    steps = random_steps(sizes, steps=5)
    program = Lockstep(both)
    alone = [
        r._replace(microbatches=1 - i) for i, r in enumerate(readings((8, 0)))
    ]  # one worker, and one with nothing to do
    before = program.step(steps[0], alone)[0]
    assert np.isnan(before).all()
    known = program.step(steps[1], readings(sizes))[0]
    assert not np.isnan(known).any()
    np.testing.assert_array_equal(program.step(steps[2], alone)[0], known)
    broken = [({"w": g["w"] * np.float32(np.nan), "b": g["b"]},) for (g,) in steps[3]]
    np.testing.assert_array_equal(program.step(broken, readings(sizes))[0], known)
    assert program.step(steps[4], readings(sizes))[0].trace != known.trace


def test_a_signal_too_small_to_divide_by_counts_as_none():
    for signal in (1e-36, 0.0, -1.0):
        averages = no_samples(np.float32)
        for trace in (1000.0, 1100.0, 1200.0):
            averages = add_sample(averages, jnp.float32([trace, signal]), 0.9)
        noise = summary(averages, 0.95)
        assert np.isfinite(noise.scale)


def test_outside_a_program_it_is_undefined():
    grads = {"w": jnp.ones(3)}
    assert np.isnan(mon.noise_scale(grads, comm.all_reduce(grads))).all()


# --- groups of one example, and layers --------------------------------------------------------------------------------


def by_leaf(path):
    return path[0]


def test_layers_have_noise_scales_of_their_own():
    sizes = (3, 9)
    steps = random_steps(sizes, steps=2)
    program = Lockstep(lambda g: both(g, by=by_leaf))
    alone = {name: Lockstep(both) for name in ("b", "w")}
    for rows in steps:
        noise = program.step(rows, readings(sizes))[1]
        for name in ("b", "w"):
            own = alone[name].step([({name: g[name]},) for (g,) in rows], readings(sizes))[1]
            np.testing.assert_allclose(noise[name], own, rtol=1e-5)
    assert list(noise) == ["b", "w"]


def test_layers_that_are_left_out_or_not_finite():
    sizes = (3, 9)
    steps = random_steps(sizes, steps=3)
    program = Lockstep(lambda g: both({**g, "c": g["w"][0]}, by=lambda path: None if path == ("c",) else path[0]))
    for rows in steps:
        before = program.step(rows, readings(sizes))[0]
    broken = [({**g, "b": np.float32(np.inf)},) for (g,) in steps[0]]
    after = program.step(broken, readings(sizes))[0]
    assert list(after) == ["b", "w"]
    np.testing.assert_array_equal(after["b"], before["b"])
    assert after["w"].trace != before["w"].trace


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"decay": 1.0}, {"decay": -0.1}, {"confidence": -0.5}, {"confidence": 1.0}])
def test_options_out_of_range_are_refused(options):
    (name,) = options
    with pytest.raises(ad.CollectiveError, match=rf"noise_scale \(test_noise.py:\d+\): {name}="):
        mon.noise_scale(jnp.ones(3), jnp.ones(3), **options)


def test_a_gradient_that_was_not_averaged_is_refused():
    def driver(w, batch):
        grads = batch.mean(0) - w
        return w, {"scale": mon.noise_scale(grads, 2 * grads).scale}

    with pytest.raises(ad.CollectiveError, match=r"noise_scale \(test_noise.py:\d+\)"):
        ad.Program(driver, jnp.zeros(3), np.ones((12, 3), np.float32), global_batch=12, world=LocalWorld(3))


# --- a program --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, 1e25])
def test_a_gradient_whose_square_overflows_is_skipped(bad):
    """The driver leaves it out, or it is finite itself: the monitor does not end the step, and keeps its averages."""

    def driver(w, batch):
        grads = batch.mean(0) - w
        spoilt = (ad.step_number() == 2) & (ad.worker_index() == 1)
        grads = jnp.where(spoilt, jnp.asarray(bad, grads.dtype), grads)
        avg_grads = comm.all_reduce(grads, nonfinite="drop")
        noise = mon.noise_scale(grads, avg_grads)
        return w, {"scale": noise.scale, "variance": mon.gradient_variance(grads, avg_grads)}

    data = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32) + 1
    with ad.Program(driver, jnp.zeros(3), data, global_batch=12, world=LocalWorld(3), resizable=False) as program:
        metrics = [program.step().metrics for _ in range(4)]
    scales = [float(m["scale"]) for m in metrics]
    assert scales[2] == scales[1] != scales[3]
    assert [bool(np.isfinite(m["variance"])) for m in metrics] == [True, True, False, True]
