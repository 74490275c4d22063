"""How far replicas are apart, exactly and by sketches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive import CollectiveError
from adaptive.runtime.local_world import LocalWorld

SIZES = (6, 4, 2)
DATA = np.random.default_rng(0).normal(size=(96, 3)).astype(np.float32)


def program_of(watch, first=0.0, **options):
    """Each worker's parameters are its own; `watch` makes the metrics of them and of a replicated average."""

    def driver(state, batch):
        own = jax.tree.map(lambda w: w + (1 + ad.worker_index()).astype(jnp.float32) / 100, state["own"])
        metrics = watch(state["own"], state["average"])
        return {**state, "own": own}, {**metrics, "mean": comm.all_reduce(batch.mean())}

    rng = np.random.default_rng(1)
    params = {
        "a": rng.normal(size=(40, 50)).astype(np.float32) * (first != 0) + first,
        "b": np.full(7, first, np.float32),
    }
    state = {"own": params, "average": jax.tree.map(lambda x: x + np.float32(0.25), params)}
    options = {"shares": SIZES, "world": LocalWorld(3)} | options
    return ad.Program(
        driver, state, DATA, global_batch=12, per_worker_state=lambda s: s["own"], resizable=False, **options
    )


def vectors(program):
    found = [program._parts.state_as_given(leaves) for leaves in program._parts.engine.states]
    flat = [np.concatenate([np.asarray(x).reshape(-1) for x in jax.tree.leaves(s["own"])]) for s in found]
    average = np.concatenate([np.asarray(x).reshape(-1) for x in jax.tree.leaves(found[0]["average"])])
    return np.stack(flat).astype(np.float64), average.astype(np.float64)


def apart(xs, center, sizes=SIZES):
    return np.sqrt(np.average(((xs - center) ** 2).sum(1), weights=sizes)) / np.linalg.norm(center)


def test_against_an_average_it_is_exact_for_one_number():
    program = program_of(lambda own, average: {"d": mon.replica_distance(own, average)}, 1.0, microbatch=2)
    for _ in range(3):
        xs, average = vectors(program)
        np.testing.assert_allclose(program.step().metrics["d"], apart(xs, average), rtol=1e-5)


def test_without_one_it_is_nearly_the_distance_from_the_mean():
    shares = (7, 5, 0)
    program = program_of(lambda own, _: {"d": mon.replica_distance(own)}, 1.0, shares=shares)
    assert program.step().metrics["d"] == 0
    errors = []
    for _ in range(40):
        xs, _ = vectors(program)
        expected = apart(xs, np.average(xs, axis=0, weights=shares), shares)
        errors.append(float(program.step().metrics["d"]) / expected - 1)
    assert np.abs(errors).max() < 0.2
    assert np.abs(np.mean(errors)) < 0.03
    assert np.std(errors) > 0.001  # another sketch in each step


def test_replicas_that_are_all_zero_are_alike():
    program = program_of(lambda own, _: {"d": mon.replica_distance(own)})
    assert program.step().metrics["d"] == 0
    assert program.step().metrics["d"] > 0


def test_values_without_a_divergence_are_refused():
    with pytest.raises(CollectiveError, match=r"replica_distance.*equal on all workers(?s:.*)strategy.replica"):
        program_of(lambda own, average: {"d": mon.replica_distance(average)})
    with pytest.raises(
        CollectiveError,
        match=r"distance.*argument can differ between them.*Leave average= out.*(?s:.*)mon.replica_distance\(params\)",
    ):
        program_of(lambda own, average: {"d": mon.replica_distance(own, jax.tree.map(lambda x: x * 2, own))})
    with pytest.raises(CollectiveError, match=r"params\['n'\] is int32, not a float"):
        mon.replica_distance({"n": jnp.arange(3)})
