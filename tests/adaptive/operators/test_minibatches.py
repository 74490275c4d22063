"""Drivers that take several steps on a local batch: batches stay whole, and their sizes are multiples."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import make_data, mean_loss, planned

STEPS = 4


def local_step(w, minibatch):
    loss, grad = jax.value_and_grad(mean_loss)(w, minibatch)
    return w - 0.1 * grad, loss


def federated(w, batch):
    w, losses = jax.lax.scan(local_step, w, ad.minibatches(batch, STEPS))
    return comm.all_reduce(w), {"loss": comm.all_reduce(losses.mean())}


def program_of(driver=federated, global_batch=24, workers=3, examples=96, **options) -> ad.Program:
    world = LocalWorld(workers)
    return ad.Program(driver, jnp.zeros(3), make_data(examples), global_batch=global_batch, world=world, **options)


# --- the cut ----------------------------------------------------------------------------------------------------------


def test_outside_a_program_the_batch_has_to_fit():
    with pytest.raises(ad.BatchSizeError, match="10 examples cannot be cut into 4 minibatches of equal size"):
        ad.minibatches(jnp.zeros((10, 2)), 4)
    with pytest.raises(ad.DriverError, match="one row for each example"):
        ad.minibatches({"x": jnp.zeros(())}, 4)


def test_only_the_batch_can_be_cut_into_minibatches():
    def of(rows):
        def driver(w, batch):
            cut = ad.minibatches({"other": jnp.concatenate([batch["x"]] * 2)[:rows]}, 4)
            return w, {"sum": comm.all_reduce(cut["other"].sum())}

        return driver

    for rows in (4, 16):
        expected = rf"batch\['other'\] has shape \({rows}, 3\); it must have 8 rows, one for each"
        with pytest.raises(ad.DriverError, match=expected):
            planned(of(rows), jnp.zeros(3), 8)
    planned(of(8), jnp.zeros(3), 8)


# --- what a plan makes of it ------------------------------------------------------------------------------------------


def test_a_batch_with_minibatches_runs_as_one_microbatch():
    plan = planned(federated, jnp.zeros(3), 8)
    assert (plan.splittable, plan.multiple) == (False, STEPS)
    (why,) = plan.unsplittable
    assert "takes 4 steps on the whole local batch, not on each microbatch" in why


def by_size(w, batch):
    w, losses = jax.lax.scan(local_step, w, ad.minibatches(batch, size=8))
    return comm.all_reduce(w), {"loss": comm.all_reduce(losses.mean()), "steps": comm.all_gather(len(losses))}


def test_of_a_fixed_size_there_are_as_many_as_the_batch_has():
    batch = {"x": jnp.arange(24.0).reshape(12, 2), "y": jnp.arange(12)}
    cut = ad.minibatches(batch, size=4)
    assert cut["x"].shape == (3, 4, 2)
    assert cut["y"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    with pytest.raises(ad.BatchSizeError, match="10 examples cannot be cut into minibatches of 4"):
        ad.minibatches(jnp.zeros((10, 2)), size=4)
    with pytest.raises(ad.DriverError, match=r"give either steps=.*got steps=2 and size=4"):
        ad.minibatches(batch, 2, size=4)
    with pytest.raises(ad.DriverError, match="size= is a number known while tracing, 1 or more; got 0"):
        ad.minibatches(batch, size=0)


def test_of_a_fixed_size_workers_take_as_many_steps_as_their_batches_allow():
    with program_of(by_size, 72, shares=(1, 3, 5)) as program:
        assert (program._parts.plan.splittable, program._parts.plan.multiple) == (False, 8)
        assert "takes a step on every 8 examples" in program.explain()
        whole, cuts, models = program._parts.stream.peek(program.batch_sizes), (0, 8, 32, 72), []
        assert program.step().metrics["steps"].tolist() == [1, 3, 5]
        for start, end in pairwise(cuts):
            w = jnp.zeros(3)
            for k in range(start, end, 8):
                w = local_step(w, jax.tree.map(lambda a, k=k: a[k : k + 8], whole))[0]
            models.append((end - start) / 72 * w)
        np.testing.assert_allclose(program.state, sum(models), rtol=2e-6)
        with pytest.raises(
            ad.BatchSizeError, match=r"global_batch=50 is not a multiple of 8, .* nearest are 48 and 56"
        ):
            program.rescale(global_batch=50)


def test_wherever_it_is_cut():
    """In a nested jit, whose trace JAX keeps, and in a loop that is traced as one."""

    @jax.jit
    def train(w, batch):
        return jax.lax.scan(local_step, w, ad.minibatches(batch, STEPS))[0]

    def nested(w, batch):
        return comm.all_reduce(train(w, batch)), {}

    def in_a_loop(w, batch):
        w = jax.lax.fori_loop(0, 2, lambda _, w: train(w, batch), w)
        return comm.all_reduce(w), {}

    for driver in (nested, in_a_loop, nested):
        plan = planned(driver, jnp.zeros(3), 8)
        assert (plan.splittable, plan.multiple) == (False, STEPS)


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_every_worker_must_be_able_to_take_as_many_as_there_are_minibatches():
    with pytest.raises(
        ad.BatchSizeError, match="global_batch=8 is too small for 3 workers: each takes at least 4 exam"
    ):
        program_of(global_batch=8)
    with pytest.raises(ad.BatchSizeError, match=r"worker 1 can have at most 3 examples .* multiples of 4"):
        program_of(max_local_batch=(8, 3, 20))
    with program_of(max_local_batch=(9, 11, 20)) as program:
        assert program._parts.sizes.limits.upper == (8, 8, 20)


@pytest.mark.parametrize("microbatch", [3, 8])
def test_microbatch_cannot_be_combined_with_minibatches(microbatch):
    with pytest.raises(ad.DriverError, match=f"microbatch={microbatch}: this driver's batches cannot be split"):
        program_of(microbatch=microbatch)


# --- running ----------------------------------------------------------------------------------------------------------


def reference(w, batches):
    """Federated averaging in plain JAX: rounds of batches, one for each client."""
    for of_clients in batches:
        models, weights = [], []
        for batch in of_clients:
            model, n = w, len(batch["y"])
            for k in range(STEPS):
                part = slice(k * n // STEPS, (k + 1) * n // STEPS)
                model = local_step(model, jax.tree.map(lambda a, part=part: a[part], batch))[0]
            models.append(model)
            weights.append(n)
        w = sum(n * m for n, m in zip(weights, models, strict=True)) / sum(weights)
    return w


def test_a_round_is_federated_averaging_for_any_sizes():
    rounds, sizes = [], []
    with program_of(global_batch=48, shares=(1, 4, 7), seed=2) as program:
        for step in range(4):
            if step == 2:
                program.rescale(shares=(2, 5, 5))
                program.warm_up()
            whole, starts = program._parts.stream.peek(program.batch_sizes), np.cumsum([0, *program.batch_sizes])
            rounds.append([jax.tree.map(lambda a, s=s, e=e: a[s:e], whole) for s, e in pairwise(starts)])
            sizes.append(program.step().batch_sizes)
        got = program.state
    assert sizes == [(4, 16, 28)] * 3 + [(8, 20, 20)]
    np.testing.assert_allclose(got, reference(jnp.zeros(3), rounds), rtol=2e-6)


def test_check_splits_into_multiples_and_finds_that_clients_differ():
    with program_of() as program:
        result = program.check()
        assert not result
        assert all(
            part % STEPS == 0 and len(microbatches) == 1
            for split in result.splits
            for microbatches in split
            for part in microbatches
        )
        assert "several steps on a local batch" in str(result)
        with pytest.raises(ad.BatchSizeError, match="10 examples are no multiple of 4, as the driver's"):
            program.check(make_data(10))
        assert "nothing to compare" in str(program.check(make_data(8)))
    with program_of(workers=1) as program:
        assert "nothing to compare on one worker: minibatches" in str(program.check())
