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

pytestmark = pytest.mark.usefixtures("double_precision")

SIZES = (5, 3, 7, 4, 1)
RATE = 0.05


def data(examples=200):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(examples, 4))
    return {"x": x, "y": x @ np.arange(4.0) + rng.normal(size=examples)}


def mean_loss(params, batch):
    return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean()


def first_params():
    return {"w": jnp.zeros(4), "b": jnp.zeros(())}


def driver_of(reduce, spoil=lambda grads: grads):
    def driver(params, batch):
        grads = spoil(jax.grad(mean_loss)(params, batch))
        grads = reduce(grads)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), {}

    return driver


def built(driver, **options):
    given = {"world": LocalWorld(len(SIZES)), "shares": SIZES, "global_batch": sum(SIZES), "resizable": False}
    return ad.Program(driver, first_params(), data(), **(given | options))


def with_own_gradients(program, steps=3):
    """Step by step: the parameters before, each worker's own gradient as a vector (b, w…), and the parameters after."""
    take, seen = program._parts.stream.take, []

    def taken(*args, **options):
        seen.append(take(*args, **options))
        return seen[-1]

    program._parts.stream.take = taken
    for _ in range(steps):
        before = jax.tree.map(np.asarray, program.state)
        program.step()
        own = []
        for batch in seen[-1].batches:
            x, y = np.asarray(batch["x"]), np.asarray(batch["y"])
            rest = x @ before["w"] + before["b"] - y
            own.append(np.concatenate([[2 * rest.mean()], 2 * rest @ x / len(y)]))
        yield vector(before), np.stack(own), vector(program.state)


def vector(params):
    return np.concatenate([[np.asarray(params["b"])], np.asarray(params["w"])])


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
    program = built(driver_of(lambda g: comm.all_reduce(g, op=op)), microbatch=microbatch)
    for before, own, after in with_own_gradients(program):
        np.testing.assert_allclose(after, before - RATE * expected(own, SIZES), rtol=1e-10, atol=1e-12)


def test_nans_on_most_workers_raise():
    def spoil(grads):
        return jax.tree.map(lambda g: jnp.where(ad.worker_index() < 3, jnp.nan, g), grads)

    program = built(driver_of(lambda g: comm.all_reduce(g, op="median"), spoil))
    before = vector(program.state)
    with pytest.raises(ad.NonFiniteError):
        program.step()
    np.testing.assert_array_equal(vector(program.state), before)


def test_contributions_that_are_not_finite_are_dropped_with_their_examples():
    def spoil(grads):
        return {"w": grads["w"], "b": jnp.where(ad.worker_index() == 2, jnp.nan, grads["b"])}

    program = built(driver_of(lambda g: comm.all_reduce(g, nonfinite="drop"), spoil), microbatch=2)
    rest = [n for worker, n in enumerate(SIZES) if worker != 2]
    for before, own, after in with_own_gradients(program):
        mean = np.average(np.delete(own, 2, axis=0), axis=0, weights=rest)
        np.testing.assert_allclose(after, before - RATE * mean, rtol=1e-12)


def test_if_no_contribution_is_finite_the_step_raises():
    program = built(driver_of(lambda g: comm.all_reduce(g, nonfinite="drop"), lambda g: jax.tree.map(jnp.log, g)))
    with pytest.raises(ad.NonFiniteError, match="mean over no examples"):
        list(program.run(steps=3))


def test_stochastic_rounding_is_right_on_average():
    """Of a gradient that stays the same, sums over steps."""
    constant = np.array([1 + 2**-10, -3 - 2**-9, 0.1, 7e-4])  # none is a bfloat16

    def driver(total, batch):
        own = jnp.asarray(constant) * (1 + ad.worker_index()).astype(float) + 0 * batch["x"].sum()
        return [
            t + comm.all_reduce(own, op="sum", wire="bfloat16", rounding=r) for t, r in zip(total, kinds, strict=True)
        ], {}

    kinds = ["nearest", "stochastic"]
    program = ad.Program(driver, [jnp.zeros(4)] * 2, data(), global_batch=12, world=LocalWorld(3), resizable=False)
    steps = 100
    for _ in range(steps):
        program.step()
    errors = [np.abs(np.asarray(t) / (6 * steps) - constant) / np.abs(constant) for t in program.state]
    assert errors[0].max() > 1e-3  # always rounded the same way
    assert errors[1].max() < 1e-3


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
        built(driver_of(lambda g: comm.all_reduce(g, **options)))


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
