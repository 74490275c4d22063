"""Ways to combine what workers have, over uneven batches, against what numpy makes of the workers' own gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive import CollectiveError
from adaptive.runtime.local_world import LocalWorld

from .linear import FIRST, PARAMS, close, data, gradient, mean_loss, steps, vector

pytestmark = pytest.mark.usefixtures("double_precision")

SIZES = (5, 3, 7, 4, 1)
RATE = 0.05


def driver_of(spoil=lambda grads: grads, **how):
    def driver(params, batch):
        grads = comm.all_reduce(spoil(jax.grad(mean_loss)(params, batch)), **how)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), {}

    return driver


def built(driver, **options):
    given = {"world": LocalWorld(len(SIZES)), "shares": SIZES, "global_batch": sum(SIZES), "resizable": False}
    return ad.Program(driver, PARAMS, data(), **(given | options))


def check_descent(program, expected):
    """`expected`: of the workers' gradients, as rows, the combined one."""
    v = FIRST
    for batches in steps(program, 3):
        v = v - RATE * expected(np.stack([gradient(v, batch) for batch in batches]))
        close(vector(program.state), v)


def weighted_median(values, weights):
    """Of one element: the definition, by looking at every cut."""
    order = np.argsort(values)
    below, half = np.cumsum(np.asarray(weights, float)[order]), sum(weights) / 2
    lower = values[order][np.flatnonzero(below >= half)[0]]
    upper = values[order][np.flatnonzero(below > half)[0]]
    return (lower + upper) / 2


def trimmed(values, weights, trim):
    kept = np.argsort(values)[trim : len(values) - trim]
    return np.average(values[kept], weights=np.asarray(weights)[kept])


def geometric(rows, weights):
    point = np.average(rows, axis=0, weights=weights)
    for _ in range(2000):
        pull = np.asarray(weights) / np.linalg.norm(rows - point, axis=1)
        point = pull @ rows / pull.sum()
    return point


@pytest.mark.parametrize(
    ("op", "expected", "microbatch"),
    [
        ("median", lambda rows, n: np.array([weighted_median(c, n) for c in rows.T]), 2),
        (comm.trimmed_mean(1), lambda rows, n: np.array([trimmed(c, n, 1) for c in rows.T]), 3),
        (comm.geometric_median(), geometric, 2),
    ],
    ids=["median", "trimmed", "geometric"],
)
def test_workers_gradients_are_reduced_by_their_examples(op, expected, microbatch):
    check_descent(built(driver_of(op=op), microbatch=microbatch), lambda rows: expected(rows, SIZES))


def test_nans_on_most_workers_raise():
    def spoil(grads):
        return jax.tree.map(lambda g: jnp.where(ad.worker_index() < 3, jnp.nan, g), grads)

    program = built(driver_of(spoil, op="median"))
    with pytest.raises(ad.NonFiniteError):
        program.step()
    np.testing.assert_array_equal(vector(program.state), FIRST)


def test_contributions_that_are_not_finite_are_dropped_with_their_examples():
    def spoil(grads):
        return {"w": grads["w"], "b": jnp.where(ad.worker_index() == 2, jnp.nan, grads["b"])}

    program, there = built(driver_of(spoil, nonfinite="drop"), microbatch=2), [0, 1, 3, 4]
    check_descent(program, lambda rows: np.average(rows[there], axis=0, weights=np.array(SIZES)[there]))


def test_if_no_contribution_is_finite_the_step_raises():
    program = built(driver_of(lambda g: jax.tree.map(lambda x: jnp.log(x) * jnp.nan, g), nonfinite="drop"))
    with pytest.raises(ad.NonFiniteError, match="mean over no examples"):
        program.step()


def test_values_are_rounded_as_asked():
    def driver(params, batch):
        own = 1 + 2.0**-10 + 0 * batch["x"].sum() + jnp.zeros(100)  # between two numbers of the format
        return params, {
            r: comm.all_reduce(own, op="sum", wire="bfloat16", rounding=r) for r in ("nearest", "stochastic")
        }

    metrics = built(driver).step().metrics
    assert {*np.asarray(metrics["nearest"]).tolist()} == {len(SIZES)}
    assert len({*np.asarray(metrics["stochastic"]).tolist()}) > 1


@pytest.mark.parametrize(("value", "microbatch"), [(60_000.0, 2), (1e-3, None)])
def test_a_mean_in_float16_reaches_as_far_as_its_values(value, microbatch):
    """What travels is of the mean's magnitude, and not the sum over examples, which float16 would not hold."""

    def driver(params, batch):
        own = value + 0 * batch["x"].sum() + jnp.arange(3.0) * value / 100
        return params, {"mean": comm.all_reduce(own, wire=jnp.float16)}

    program = built(driver, microbatch=microbatch)
    np.testing.assert_allclose(program.step().metrics["mean"], value * (1 + np.arange(3) / 100), rtol=2e-3)


@pytest.mark.parametrize("options", [{"op": "sum"}, {"weight": 40.0}], ids=str)
def test_overflow_of_the_wire_dtype_is_named(options):
    def driver(params, batch):
        return params, {"s": comm.all_reduce(30_000 + 0 * batch["x"].sum(), wire=jnp.float16, **options)}

    with pytest.raises(
        ad.NonFiniteError, match=r"too large for float16 \(65504 at most\), the format in which it is sent"
    ):
        built(driver).step()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"op": "mode"}, "op= must be .*; got 'mode'"),
        (
            {"op": comm.trimmed_mean(3)},
            "leaves out the values of 6 workers, but there are 5(?s:.*)comm.trimmed_mean\\(2\\)",
        ),
        ({"nonfinite": "skip"}, "nonfinite= must be 'drop' or None"),
        ({"nonfinite": "drop", "op": "max"}, "op='max' cannot leave workers out"),
        ({"wire": jnp.int8}, "wire=int8 is not a supported format"),
        ({"wire": "float7"}, "wire='float7' is not a supported format"),
        ({"wire": jnp.bfloat16, "op": "max"}, "wire= is for means and sums"),
        ({"wire": jnp.bfloat16, "op": "median"}, "op='median' supports no other format"),
        ({"wire": jnp.bfloat16, "rounding": "up"}, "rounding= must be .*; got 'up'"),
        ({"wire": jnp.float16, "rounding": "stochastic"}, "needs wire=jnp.bfloat16"),
        ({"wire": jnp.bfloat16, "rounding": "error_feedback"}, "is for bits"),
        ({"op": "sum", "weight": 2.0}, "op='sum' takes no weight="),
    ],
)
def test_meaningless_arguments_are_refused(options, text):
    with pytest.raises(CollectiveError, match=text):
        built(driver_of(**options))


def test_of_integers_and_complex_numbers_there_is_no_such_thing():
    with pytest.raises(CollectiveError, match="which has no median"):
        comm.all_reduce(np.arange(3), op="median")
    with pytest.raises(CollectiveError, match="only real floats"):
        comm.all_reduce(np.arange(3), op="sum", wire=jnp.bfloat16)
    with pytest.raises(CollectiveError, match="must be a positive integer"):
        comm.trimmed_mean(0)
    with (
        pytest.raises(CollectiveError, match="numbers of examples are unknown"),
        comm.DeviceWorld(jax.local_devices()[:2]),
    ):
        comm.all_reduce(1.0, op="median")
