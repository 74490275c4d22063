"""Squared gradient norms that are estimated from those of the norm layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive.runtime.local_world import LocalWorld
from monitors._example_trace import differentiate
from monitors._norm_layers import EstimatedNorms, after_measurement, norm_layer_leaves, ratio_error, ratio_weights

from .lockstep import Lockstep, reading
from .test_example_norms import MODELS, by_vmap, rows

SIZES = (3, 3)
READINGS = [reading(worker=i, examples=b, batch_size=b, global_batch=6) for i, b in enumerate(SIZES)]


def loss(params, batch):
    """A layer, a norm layer without its mean, and a head."""
    hidden = batch["x"] @ params["first"]
    hidden = params["norm"]["scale"][None] * hidden * jax.lax.rsqrt((hidden**2).mean(-1, keepdims=True) + 1e-3)
    return jnp.mean((jnp.tanh(hidden + params["norm"]["bias"][None]) @ params["last"] - 1) ** 2)


def parameters(seed=0):
    rng = np.random.default_rng(seed)
    norm = {"scale": jnp.asarray(rng.uniform(0.5, 1.5, 5), jnp.float32), "bias": jnp.zeros(5) + 0.1}
    first, last = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((7, 5), (5,)))
    return {"first": first, "norm": norm, "last": last}


def on_two_workers(every):
    """Return a function of parameters and examples: the norms of each worker's examples, as full_every= has them."""
    driver = Lockstep(lambda params, x: mon.example_norms(loss, full_every=every)(params, {"x": x})[2].norms)

    def norms(params, x):
        found = driver.step([(params, x[:3]), (params, x[3:])], READINGS)
        return jax.tree.map(lambda *parts: np.concatenate(parts), *found)

    return norms


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("plain", []),
        ("linen convolutions", ["GroupNorm_0.bias", "GroupNorm_0.scale"]),
        (
            "attention with tied embeddings",
            ["LayerNorm_0.bias", "LayerNorm_0.scale", "LayerNorm_1.bias", "LayerNorm_1.scale", "RMSNorm_0.scale"],
        ),
        ("nnx", ["norm.bias", "norm.scale"]),
        ("equinox", ["norm.weight", "norm.bias"]),
    ],
)
def test_the_norm_layers_of_each_library_are_found(model, expected):
    make, data = MODELS[model]
    (loss_fn, params), batch = make(), data()
    leaves, tree = jax.tree.flatten(params)
    rows_of_batch, batch_tree = jax.tree.flatten(batch)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    found = []

    def look(leaves, rows_of_batch):
        def flat(leaves, rows_of_batch):
            return loss_fn(jax.tree.unflatten(tree, leaves), jax.tree.unflatten(batch_tree, rows_of_batch)), None

        traced = differentiate(flat, leaves, list(map(jnp.asarray, rows_of_batch)), 6)
        found.extend(norm_layer_leaves(traced.uses, paths, leaves))
        return 0

    jax.eval_shape(look, leaves, rows_of_batch)
    names = [jax.tree_util.keystr(paths[i], simple=True, separator=".") for i in found]
    assert [name.removeprefix("params.").removesuffix(".value") for name in names] == expected


def test_norms_are_exact_at_doubling_intervals_and_estimated_in_between():
    norms, rng = on_two_workers(every=2), np.random.default_rng(3)
    for step in range(6):
        params, x = parameters(), rng.standard_normal((6, 7)).astype(np.float32)
        found, truth = norms(params, x), by_vmap(loss, params, {"x": x})
        for name in ("scale", "bias"):
            np.testing.assert_allclose(found["norm"][name], truth["norm"][name], rtol=1e-4)
        assert np.allclose(found["first"], truth["first"], rtol=1e-4) == (step in [0, 1, 3, 5]), step


def test_the_ratio_is_that_of_all_workers_examples_and_weighs_earlier_ones_less():
    norms, rng = on_two_workers(every=100), np.random.default_rng(4)
    first, second, third = rng.standard_normal((3, 6, 7)).astype(np.float32)
    params = parameters()
    for x in (first, second):
        norms(params, x)
    found = norms(params, third)
    truths = [by_vmap(loss, params, {"x": x}) for x in (first, second, third)]
    own = [truth["norm"]["scale"] + truth["norm"]["bias"] for truth in truths]
    for name in ("first", "last"):
        sums = [0.7 * np.sum(a) + np.sum(b) for a, b in ((truths[0][name], truths[1][name]), (own[0], own[1]))]
        np.testing.assert_allclose(found[name], sums[0] / sums[1] * own[2], rtol=1e-4)


def test_gradients_that_are_not_finite_leave_the_ratio_alone():
    """Of one example of each worker, in a step that measures the ratio."""
    norms, rng = on_two_workers(every=100), np.random.default_rng(6)
    params, x = parameters(), rng.standard_normal((6, 7)).astype(np.float32)
    norms(params, x)
    norms(params, np.where(np.arange(6)[:, None] % 3 == 2, np.inf, x).astype(np.float32))
    found, truth = norms(params, x), by_vmap(loss, params, {"x": x})
    np.testing.assert_allclose(np.sum(found["first"]), np.sum(truth["first"]), rtol=1e-4)


def test_a_model_without_norm_layers_is_refused():
    with pytest.raises(
        ad.CollectiveError, match=r"example_norms \(test_norm_layers.py:\d+\): .*no parameter multiplies"
    ):
        mon.example_norms(lambda w, batch: jnp.mean((batch["x"] @ w) ** 2), full_every=10)(jnp.ones(7), rows())


def test_a_program_has_the_noise_scale_of_all_layers():
    """Of a model that does not move: the estimate from norm layers is close to the one from all layers."""
    rng = np.random.default_rng(1)
    data = {"x": rng.standard_normal((4000, 7)).astype(np.float32)}

    def driver(params, batch):
        metrics = {}
        for name, every in (("whole", 1), ("estimated", 20)):
            _, grads, norms = mon.example_norms(loss, full_every=every)(params, batch)
            average = comm.all_reduce(grads)
            metrics[name] = mon.noise_scale(grads, average, per_example=norms, decay=0.99).trace
        return params, metrics

    options = {"global_batch": 12, "world": LocalWorld(2), "resizable": False, "deterministic": True}
    with ad.Program(driver, parameters(), data, **options) as program:
        metrics = [program.step().metrics for _ in range(100)][-1]
    estimated, whole = float(metrics["estimated"]), float(metrics["whole"])
    assert estimated == pytest.approx(whole, rel=0.1)
    assert estimated != whole


def test_the_error_of_the_ratio_is_that_of_repeated_measurements():
    """Three leaves, of which the first is a norm layer's; the last two are proportional to it, with an error."""
    rng = np.random.default_rng(7)
    own = 1 + 0.2 * rng.standard_normal((4000, 8))
    others = np.stack([2 * own, 5 * own]) + 0.3 * rng.standard_normal((2, 4000, 8))
    measured = jnp.asarray(np.stack([own, *others], -1), jnp.float32)
    weights = np.asarray(ratio_weights(measured[0], (0,))[0], np.float64)
    np.testing.assert_allclose(weights, 0.7 ** np.arange(8), rtol=1e-6)
    for leaves, rest in (((0, 1, 2), others.sum(0)), ((0, 2), others[1]), ((1,), others[0])):
        deviation, dof = jax.vmap(lambda m, leaves=leaves: ratio_error(m, (0,), leaves))(measured)
        ratios = rest @ weights / (own @ weights)
        share = 1 / (ratios.mean() + (0 in leaves))  # of the norm layers in the sum
        assert np.mean(np.square(deviation)) ** 0.5 == pytest.approx(ratios.std() * share, rel=0.05)
        assert dof[0] == pytest.approx(weights.sum() ** 2 / (weights**2).sum() - 1, rel=1e-5)


def test_a_sum_over_norm_layers_has_no_error_and_one_measurement_says_nothing():
    measured = jnp.zeros((8, 3))
    measured = after_measurement(measured, jnp.array([1.0, 2.0, 5.0]))
    alone = ratio_error(measured, (0,), (0, 1, 2))
    assert alone.deviation == pytest.approx(7 / 8)
    assert alone.dof < 0.5
    measured = after_measurement(measured, jnp.array([1.0, 3.0, 4.0]))
    assert ratio_error(measured, (0,), (0,)).deviation == 0
    assert ratio_error(measured, (0,), (0, 1)).deviation > 0.1


def test_bounds_contain_the_error_of_the_ratio():
    """Of norms that are the same in each step, and of a ratio that was measured as 1, 3, 1 and 3."""
    squares = {"norm": jnp.ones(8), "other": 2 * jnp.ones(8)}
    measured = np.zeros((8, 2))
    measured[:4] = [[16, 16], [16, 48], [16, 16], [16, 48]]
    grads = {"norm": jnp.float32(0.5), "other": jnp.float32(0.5)}
    estimated = EstimatedNorms(squares, jnp.asarray(measured, jnp.float32), (0,))

    def driver(x):
        return [
            mon.noise_scale(jax.tree.map(lambda g: g * x, grads), grads, per_example=norms, by=by)
            for norms in (squares, estimated)
            for by in (None, lambda path: path[0])
        ]

    given = [reading(worker=i, examples=8, batch_size=8, global_batch=16) for i in range(2)]
    lockstep = Lockstep(driver)
    for _ in range(20):
        (found, _) = lockstep.step([(jnp.float32(1),)] * 2, given)
    found = jax.tree.map(float, found)
    exact, exact_sets, bounded, bounded_sets = found
    assert exact.lower == pytest.approx(exact.upper, rel=1e-3)
    assert bounded.lower < 0.8 * exact.scale < 1.2 * exact.scale < bounded.upper
    assert bounded.scale == pytest.approx(exact.scale)
    assert bounded_sets["norm"].lower == pytest.approx(exact_sets["norm"].lower)
    assert bounded_sets["other"].upper > 1.2 * exact_sets["other"].upper
