"""`scale_adamw`: a step is one of AdamW with the rules' values, and runs with any batch follow one equation."""

from __future__ import annotations

from math import sqrt

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import controllers as ctrl

SETTINGS = {"b1": 0.9, "b2": 0.99, "eps": 1e-3, "weight_decay": 0.3}
DATA = {"x": np.zeros((4096, 1), np.float32)}


def by_hand(s):
    """AdamW with the values of the table in `scale_adamw`."""
    b1, b2, eps, decay = SETTINGS.values()
    return optax.adamw(0.1 * sqrt(s), b1**s, b2**s, eps / sqrt(s), weight_decay=decay * sqrt(s))


@pytest.mark.parametrize("batch", [2, 12])
def test_a_step_is_one_of_adamw_with_the_values_for_its_batch(batch):
    tx, reference, w = ctrl.scale_adamw(0.1, base=4, **SETTINGS), by_hand(batch / 4), jnp.array([1.0, -2.0, 0.5])
    gradients = jax.random.normal(jax.random.key(0), (8, 3))

    def driver(state, batch):
        updates, opt_state = tx.update(gradients[ad.step_number() % 8], state[1], state[0])
        return (state[0] + updates, opt_state), {}

    with ad.Program(driver, (w, tx.init(w)), DATA, global_batch=batch) as program:
        for _ in program.run(steps=8):
            pass
        found, state = program.state
    by_optax, opt_state = w, reference.init(w)
    with jax.numpy_dtype_promotion("standard"):  # as optax needs it
        for g in gradients:
            updates, opt_state = reference.update(g, opt_state, by_optax)
            by_optax = by_optax + updates
    np.testing.assert_allclose(found, by_optax, rtol=2e-5)
    assert float(state.progress) == 8 * batch / 4


def test_outside_a_program_it_is_adamw_of_the_base_batch():
    tx, reference = ctrl.scale_adamw(0.1, base=256, **SETTINGS), by_hand(1.0)
    w = {"a": jnp.array([1.0, 2.0]), "b": jnp.ones(2, jnp.bfloat16)}
    with jax.numpy_dtype_promotion("standard"):  # as optax needs it
        updates, expected = (each.update(w, each.init(w), w)[0] for each in (tx, reference))
    np.testing.assert_allclose(updates["a"], expected["a"], rtol=1e-5)
    assert updates["b"].dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_in_double_precision_a_state_keeps_its_dtypes(dtype):
    with jax.enable_x64(True):
        w = jnp.ones(3, dtype)

        def driver(state, batch):
            tx = ctrl.scale_adamw(ad.hyperparameter("lr", 0.1), base=4)
            updates, opt_state = tx.update(jnp.ones(3, dtype), state[1], state[0])
            return (state[0] + updates, opt_state), {}

        state = w, ctrl.scale_adamw(0.1, base=4).init(w)
        with ad.Program(driver, state, DATA, global_batch=8) as program:
            program.step()
            program.step()
            assert [a.dtype for a in jax.tree.leaves(program.state)] == [a.dtype for a in jax.tree.leaves(state)]


def test_weights_outside_the_mask_do_not_decay():
    tx, w = ctrl.scale_adamw(0.1, base=4, weight_decay=0.5, mask={"a": True, "b": False}), dict.fromkeys("ab", 1.0)
    updates, _ = tx.update(dict.fromkeys("ab", jnp.zeros(())), tx.init(w), w)
    assert float(updates["a"]) == pytest.approx(-0.05)
    assert float(updates["b"]) == 0.0


def test_the_average_of_squares_changes_with_the_batch_at_once():
    """Right after the batch has grown fourfold, a step moves the weights as far as four steps before."""
    tx, sizes = ctrl.scale_adamw(1e-3, base=4, b1=0.0, b2=0.998, weight_decay=0.0), [4] * 400 + [16] * 3

    def driver(state, batch):
        moved, opt_state = state
        draw = jax.random.normal(jax.random.fold_in(jax.random.key(0), ad.step_number()), moved.shape)
        ctrl.hook(lambda control: control.rescale(global_batch=sizes[min(control.step, len(sizes) - 1)]))
        moved, opt_state = tx.update(draw / jnp.sqrt(ad.global_batch()), opt_state, moved)
        return (moved, opt_state), {"size": jnp.sqrt(jnp.mean(moved**2))}

    w = jnp.zeros(4096)
    with ad.Program(driver, (w, tx.init(w)), DATA, global_batch=4, deterministic=True) as program:
        found = [float(report.metrics["size"]) for report in program.run(steps=len(sizes))]
    np.testing.assert_allclose(np.array(found[-3:]) / np.mean(found[300:400]), 2.0, rtol=0.05)  # noise adds in squares


def test_a_schedule_counts_base_batches():
    tx = ctrl.scale_adamw(lambda count: count, base=4, b1=0.0, b2=0.0, eps=0.0, weight_decay=0.0)

    def driver(state, batch):
        updates, state = tx.update(jnp.ones(()), state, jnp.zeros(()))
        ctrl.hook(lambda control: control.rescale(global_batch=16))
        return state, {"rate": -updates}

    with ad.Program(driver, tx.init(jnp.zeros(())), DATA, global_batch=4, deterministic=True) as program:
        rates = [float(report.metrics["rate"]) for report in program.run(steps=3)]
    np.testing.assert_allclose(rates, [0, 1 * 2, 5 * 2], rtol=1e-5)  # sqrt(s) = 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base": 0}, "base is a number of examples"),
        ({"base": "64"}, "base is a number of examples"),
        ({"base": 64, "b1": 1.0}, "b1 and b2 are from 0 to below 1"),
        ({"base": 64, "weight_decay": float("nan")}, "eps and weight_decay not negative"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ad.DriverError, match=message):
        ctrl.scale_adamw(**{"learning_rate": 0.1, **arguments})


def test_weights_are_needed():
    tx = ctrl.scale_adamw(0.1, base=4)
    with pytest.raises(ad.DriverError, match=r"weight decay needs the weights"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
