"""`measure_critical_batch`: against a problem whose critical batch is known, on one rank and on two."""

from __future__ import annotations

from functools import partial
from math import inf, nan

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl

N, LR = 4096, 0.02
SIZE = 16


def loss_fn(state, batch):
    return 0.5 * jnp.sum(state**2) + 0.0 * batch["x"].mean()


def build(noise=4.0, rule="sqrt", **options):
    """Gradient descent on a square, with Gaussian noise per example; steps of the noise scale's optimal size.

    The noise scale at w is `noise**2 * SIZE / |w|**2`, and the loss |w|**2 / 2. A batch B takes steps of
    lr / (1 + scale / B), after which one step gains in proportion to 1 / (1 + scale / B) (McCandlish et al., eq. 2.7).
    """
    data = {"x": np.random.default_rng(0).normal(size=(N, SIZE)).astype(np.float32)}
    data["x"] -= data["x"].mean(0)

    def driver(w, batch):
        size = ad.global_batch().astype(jnp.float32) if rule == "sqrt" else 4.0
        scale = noise**2 * SIZE / jnp.sum(jnp.square(w))
        gradient = comm.all_reduce(w + noise * batch["x"].mean(0))
        return w - LR / (1 + scale / size) * gradient, {}

    return ad.Program(driver, jnp.full(SIZE, 4.0), data, **{"global_batch": 4, **options})


@pytest.mark.parametrize(
    ("critical", "noise_scale", "line"),
    [
        (100.0, 250.0, "critical batch 100; noise scale 250, 2.5 times that"),
        (nan, 250.0, "critical batch nan; noise scale 250"),
        (100.0, nan, "critical batch 100"),
    ],
)
def test_a_result_is_printed_beside_the_noise_scale_where_there_is_one(critical, noise_scale, line):
    result = ctrl.CriticalBatch((ctrl.BatchBranch(16, 4, 0.5, 1.0),), 2.0, critical, 16, noise_scale)
    assert str(result).splitlines()[1:] == [
        "      16       4     0.5000        1.00",
        "loss at the start 2.0000; largest batch with an equal loss 16",
        line,
    ]


def test_the_critical_batch_is_the_noise_scale_where_the_model_holds():
    with build(noise=16.0) as program:
        program.step()
        before = program.checkpoint()
        scale = 16.0**2 * SIZE / float(jnp.sum(program.state**2))
        found = ctrl.measure_critical_batch(program, loss_fn, {"x": np.zeros((8, 1))}, examples=512, noise_scale=scale)
        after = program.checkpoint()
    alike = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), before, after)
    assert all(jax.tree.leaves(alike))
    assert [(b.batch, b.steps) for b in found.branches] == [(4, 128), (8, 64), (16, 32), (32, 16)]
    assert scale < found.critical < 2 * scale  # which the noise scale reaches at the end of the branch
    losses = [branch.loss for branch in found.branches]
    assert found.start_loss > losses[-1] > losses[0]
    assert f"noise scale {scale:.4g}" in str(found)


def test_without_noise_examples_are_worth_less_in_large_batches():
    with build(noise=0.0) as program:
        found = ctrl.measure_critical_batch(
            program, loss_fn, {"x": np.zeros((8, 1))}, examples=128.0, factors=[1.0, 2, 4]
        )
    efficiencies = [branch.efficiency for branch in found.branches]
    np.testing.assert_allclose(efficiencies, [1, 0.5, 0.25], rtol=0.05)
    assert found.critical < 1
    assert found.largest_equal == 4


def test_a_branch_that_diverges_is_worth_nothing():
    def driver(w, batch):
        lr = ad.hyperparameter("lr", 0.1)
        return w - lr * comm.all_reduce(w**3 + 0.0 * batch["x"].mean()), {}

    with ad.Program(driver, jnp.ones(()), {"x": np.zeros((256, 1), np.float32)}, global_batch=4) as program:
        found = ctrl.measure_critical_batch(
            *(program, lambda w, batch: w**2 / 2 + 0 * batch["x"].mean(), {"x": np.zeros((8, 1))}),
            examples=64,
            factors=(1, 2),
            hyperparameters=lambda k: {"lr": 0.1 if k == 1 else 1e6},
        )
    assert found.branches[1].loss == inf
    assert found.branches[1].efficiency == 0.0
    assert found.largest_equal == 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"factors": (2, 4)}, ad.DriverError, "factors ascend from 1"),
        ({"factors": (1,)}, ad.DriverError, "factors ascend from 1"),
        ({"factors": (1, 4, 2)}, ad.DriverError, "factors ascend from 1"),
        ({"examples": 31}, ad.DriverError, "examples must be at least 32"),
        ({"hyperparameters": lambda k: {"lr": k}}, ad.DriverError, "no hyperparameter 'lr'"),
        ({"factors": (1, 4096), "examples": 4 * 4096}, ad.BatchSizeError, "larger than the data set"),
    ],
)
def test_meaningless_arguments_are_refused(options, error, message):
    with build() as program:
        with pytest.raises(error, match=message):
            ctrl.measure_critical_batch(program, loss_fn, {"x": np.zeros((8, 1))}, **{"examples": 512, **options})
        assert program.steps == 0


def test_a_learning_rate_without_a_rule_is_refused():
    with build(rule="none") as program, pytest.raises(ad.DriverError, match="does not follow the batch"):
        ctrl.measure_critical_batch(program, loss_fn, {"x": np.zeros((8, 1))}, examples=512)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.on_ranks(2)
def test_ranks_measure_the_same():
    """The result, and the state that remains, are the same everywhere."""
    with comm.world() as world, build(world=world, deterministic=True) as program:
        program.step()
        before = np.asarray(program.state).tobytes()
        measure = partial(ctrl.measure_critical_batch, program, loss_fn, {"x": np.zeros((8, 1))}, examples=128)
        found = [measure(factors=(1, 2, 4)), measure(factors=(1, 2, 4))]
        assert found[0] == found[1]
        assert np.asarray(program.state).tobytes() == before
        assert world.size == 2
        assert len(set(world.all_gather_bytes(repr(found).encode()))) == 1
        assert program.step().step == 2
