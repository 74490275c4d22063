"""Federated rounds over every world: data and momentum of each client's own, against plain JAX."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm

from . import problems
from .problems import build, difference, make_data, make_params, mean_loss

COVERS = ("adaptive/operators/minibatches.py",)

STEPS, SEED, RATE, DECAY = 3, 3, 0.1, 0.8


def shards_of(workers: int) -> list[dict[str, np.ndarray]]:
    return [make_data(20 + 5 * w, seed=w) for w in range(workers)]


def initial_state():
    params = make_params()
    return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}


def local_step(carry, minibatch):
    params, momentum = carry
    loss, grads = jax.value_and_grad(mean_loss)(params, minibatch)
    momentum = jax.tree.map(lambda m, g: DECAY * m + g, momentum, grads)
    return (jax.tree.map(lambda p, m: p - RATE * m, params, momentum), momentum), loss


def federated_round(state, batch):
    carry = state["params"], state["momentum"]
    (params, momentum), losses = jax.lax.scan(local_step, carry, ad.minibatches(batch, STEPS))
    return {"params": comm.all_reduce(params), "momentum": momentum}, {"loss": comm.all_reduce(losses.mean())}


def program_over(world, **options) -> ad.Program:
    options = {"world": world, "per_worker_state": lambda state: state["momentum"], "resizable": True, **options}
    data = ad.Shards(shards_of(world.size))
    return build(federated_round, initial_state(), data, 6 * world.size, **options)


def plain_rounds(workers: int, rounds: Sequence[tuple[int, ...]]):
    """Federated averaging in plain JAX, on the documented order of each shard. Returns the model and all momenta."""
    step, shards = jax.jit(local_step), shards_of(workers)
    orders = [
        problems.stream(len(data["x"]), SEED, sum(sizes[w] for sizes in rounds), shard=w)
        for w, data in enumerate(shards)
    ]
    params, momenta, taken = make_params(), [initial_state()["momentum"]] * workers, [0] * workers
    for sizes in rounds:
        models = []
        for w, size in enumerate(sizes):
            rows = orders[w][taken[w] : taken[w] + size]
            taken[w] += size
            model = params
            for part in np.split(rows, STEPS):
                minibatch = jax.tree.map(lambda a, part=part: a[part], shards[w])
                (model, momenta[w]), _ = step((model, momenta[w]), minibatch)
            models.append(model)
        params = jax.tree.map(lambda *ps, w=sizes: np.average(ps, axis=0, weights=w), *models)
    return params, jax.tree.map(lambda *ms: np.stack(ms), *momenta)


def train(program: ad.Program, steps: range) -> list[tuple[int, ...]]:
    """Run rounds, some with requests for another global batch and split. Returns their sizes."""
    n, rounds = program.world.size, []
    for step in steps:
        if step in (1, 4):
            shares = [1 + (worker + step) % 4 for worker in range(n)]
            program.rescale(global_batch=(8 + step) // STEPS * STEPS * n, shares=shares)
            program.warm_up()
        rounds.append(program.step().batch_sizes)
    return rounds


@pytest.mark.long
@pytest.mark.parametrize("precision", ["float64"], indirect=True)
def test_rounds_are_those_of_plain_jax_through_changes_of_size_and_a_checkpoint(world, precision):
    with program_over(world) as program:
        rounds = train(program, range(4))
        middle = program.checkpoint()
        rounds += train(program, range(4, 7))
        state, momenta = program.state, program.checkpoint()["state"]["momentum"]
        assert problems.same_everywhere(world, state["params"])
    assert all(size % STEPS == 0 for sizes in rounds for size in sizes)
    assert world.size == 1 or len(set(rounds)) == 3
    params, expected = plain_rounds(world.size, rounds)
    assert difference(state["params"], params) < 1e-12
    assert difference(momenta, expected) < 1e-12

    with program_over(world) as program:
        program.restore(middle)
        assert train(program, range(4, 7)) == rounds[4:]
        assert difference(program.state, state) < 1e-14
        assert difference(program.checkpoint()["state"]["momentum"], momenta) < 1e-14
