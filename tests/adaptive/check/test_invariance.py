"""`check` tells models whose step depends on the split from those whose does not, and names what differs."""

from __future__ import annotations

import itertools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from adaptive import operators
from adaptive.operators.sources import Source, read
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import FEATURES, Recorder, make_data, mean_loss, pointed_at
from tests.relaxed import relaxed_tx

W = jnp.array([0.3, -0.2, 0.1])
DATA = make_data(32)


def check(driver, state, *, workers=2, global_batch=4, data=DATA, tolerance=None, batch=None, **options):
    with ad.Program(driver, state, data, global_batch=global_batch, world=LocalWorld(workers), **options) as program:
        return program.check(batch, tolerance=tolerance)


def train(loss_fn, tx=optax.sgd(0.1)):  # noqa: B008
    """A driver of `loss_fn(params, batch)`, and its state."""
    tx = relaxed_tx(tx)

    def driver(state, batch):
        params, opt = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt = tx.update(comm.all_reduce(grads), opt, params)
        return (optax.apply_updates(params, updates), opt), {"loss": comm.all_reduce(loss)}

    return driver, lambda params: (params, tx.init(params))


# --- models that are split-invariant ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_a_mean_loss_is_invariant_under_any_number_of_workers(workers):
    driver, init = train(mean_loss)
    found = check(driver, init(W), workers=workers)
    assert found
    assert found.verdict == "yes"
    assert found.differences == found.reports == found.reductions == {}
    assert len(found.splits) == 3
    slots = max(2, workers)  # a lone worker's step is also tried on two
    assert all(len(split) == slots and sum(map(sum, split)) == 4 for split in found.splits)
    assert str(found).startswith("split-invariant: 3 random splits of 4 examples")


def dropout(keys):
    def loss(w, batch):
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (FEATURES,)))(keys(batch))
        return mean_loss(w, {**batch, "x": batch["x"] * keep.astype(float)})

    driver, init = train(loss)
    return driver, init(W)


def test_dropout_with_keys_by_index_in_the_microbatch_is_not():
    driver, state = dropout(lambda batch: jax.random.split(ad.step_key(), batch["y"].shape[0]))
    found = check(driver, state)
    assert not found
    assert list(found.differences) == ["state[0]"]


def descend(w, batch, **metrics):
    """A driver's results: a step that is split-invariant, and some metrics."""
    return w - 0.1 * comm.all_reduce(jax.grad(mean_loss)(w, batch)), metrics


def test_operators_of_the_split_count_only_if_the_state_depends_on_them():
    def driver(state, batch):
        grads = jax.grad(mean_loss)(state, batch)
        average = comm.all_reduce(grads)
        noise = mon.noise_scale(grads, average)
        ctrl.hook(lambda control, noise: None, noise, every=20)
        ctrl.hook(ctrl.balance(), comm.all_gather(mon.compute_seconds()), every=10)
        seen = {
            "scale": noise.scale,
            "smooth": mon.ema(noise.trace),
            "variance": mon.gradient_variance(grads, average),
            "largest": comm.all_reduce(ad.batch_size(), op="max"),
            "sizes": comm.all_gather(ad.batch_size()),
            "cpu": comm.all_gather(mon.cpu_available()),
        }
        return state - 0.1 * average, seen

    found = check(driver, W)
    assert found, found


def test_what_measures_the_machine_is_held_fixed():
    ticks = itertools.count()
    clock = Source("clock", lambda reading: next(ticks))
    assert check(lambda w, b: (descend(w, b)[0] + comm.all_reduce(read(clock)), {}), W)


def test_gathered_rows_may_differ_but_values_computed_from_them_may_not():
    def driver(state, batch):
        rows = comm.all_gather(mean_loss(state, batch))
        state = jnp.where(jnp.isinf(rows).any(), state, descend(state, batch)[0])
        return state, {"rows": rows}

    def averaging(state, batch):
        return descend(state, batch, loss=comm.all_gather(mean_loss(state, batch)).mean())

    assert check(driver, W)
    found = check(averaging, W)
    assert found.verdict == "no"
    assert list(found.reports) == ["metric ['loss']"]
    assert "by all_gather" in str(found)


def test_metrics_and_hook_values_are_compared():
    def driver(state, batch):
        apart = jnp.exp(5 * mean_loss(state, batch))
        operators.hook("watch", Recorder(), (state, {"apart": comm.all_reduce(apart)}))
        smooth = comm.all_reduce(mon.ema(comm.all_reduce(apart)), op="max")
        by_hand = comm.all_reduce(ad.microbatch_size().astype(float) * apart, op="sum") / ad.global_batch().astype(
            float
        )
        return descend(state, batch, smooth=smooth, by_hand=by_hand, right=comm.all_reduce(batch["y"].mean()))

    found = check(driver, W)
    assert not found
    assert found.differences == {}
    assert set(found.reports) == {
        "hook 'watch', values[1]['apart']",
        "metric ['smooth']",
        "metric ['by_hand']",
        "operator state 'ema/0'",
    }
    assert all(name in str(found) for name in (*found.reports, *found.reductions))


def test_a_state_that_follows_such_an_operator_depends_on_the_split():
    def driver(state, batch):
        grads = jax.grad(mean_loss)(state["w"], batch)
        square = comm.all_reduce(jnp.sum(grads**2))  # the mean of squares is not the square of the mean
        return {"w": state["w"] - 0.1 * comm.all_reduce(grads), "square": state["square"] + square}, {}

    found = check(driver, {"w": W, "square": 0.0})
    assert list(found.differences) == ["state['square']"]
    (reduction,) = found.reductions
    assert "square = comm.all_reduce" in pointed_at(RuntimeError(reduction))[0]


def test_metrics_of_single_examples_give_no_false_alarm():
    def driver(state, batch):
        error = jnp.abs(batch["x"] @ state - batch["y"])
        tokens = jnp.sum(error > 0.5).astype(jnp.float32)
        spectrum = jnp.fft.fft(batch["x"], axis=1).sum(0)
        seen = {
            "most": comm.all_reduce(jnp.max(error), op="max"),
            "least": comm.all_reduce(jnp.min(error), op="min"),
            "right": comm.all_reduce(jnp.sum(error < 1), op="sum"),
            "accuracy": comm.all_reduce(jnp.mean(error < 1)),
            "by token": comm.all_reduce(
                jnp.sum(jnp.where(error > 0.5, error, 0)) / jnp.maximum(tokens, 1), weight=tokens
            ),
            "spectrum": comm.all_reduce(spectrum, op="sum"),
            "smooth": mon.ema(comm.all_reduce(error.mean())),
        }
        return descend(state, batch, **seen)

    found = check(driver, W, global_batch=8)
    assert found, found


def test_differences_that_cancel_are_not_known():
    """The variance within calls and that between them are not invariant; their sum is."""

    def driver(state, batch):
        y = batch["y"]
        within, mean = comm.all_reduce(jnp.var(y)), comm.all_reduce(y.mean())
        variance = within + comm.all_reduce((y.mean() - mean) ** 2)
        return state + variance, {}

    assert check(driver, 0.0).verdict == "not known"


# --- rounding is no difference ----------------------------------------------------------------------------------------


def test_adam_with_tiny_gradients_gives_no_false_alarm():
    """Adam's first step is as large for a gradient of 1e-9 as for one of 1."""
    driver, init = train(lambda w, b: 1e-9 * mean_loss(w, b), optax.adam(0.1, eps=1e-30))
    assert check(driver, init(W))


def test_gradients_of_rounding_errors_give_no_false_alarm_for_integer_inputs():
    """Then moving the inputs by their last place moves nothing, unless that is done to whole numbers too."""

    def loss(params, batch):
        logits = batch["x"] * params["w"][None] + params["shift"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, (batch["y"] > 0).astype(jnp.int32)).mean()

    driver, init = train(loss, optax.adam(0.1))
    found = check(driver, init({"w": jnp.ones(FEATURES), "shift": 0.0}), data={**DATA, "x": np.round(3 * DATA["x"])})
    assert found, found


def test_chaos_is_not_known():
    def driver(state, batch):
        x = comm.all_reduce(batch["x"].mean())
        for _ in range(40):
            x = jnp.sin(50 * x) + 0.3
        return state + comm.all_reduce(x * batch["y"].mean()), {}

    found = check(driver, 0.0)
    assert not found
    assert found.verdict == "not known"
    assert "rounding alone moves a value (test_invariance.py:" in str(found)


def test_a_few_percent_are_found_in_low_precision():
    def loss(w, batch):
        x, y, w = (a.astype(jnp.float8_e4m3fn) for a in (batch["x"], batch["y"], w))
        odd = 1 + 0.05 * (len(y) % 2)
        return odd * jnp.mean(((x @ w - y) ** 2).astype(jnp.float32))

    driver, init = train(loss)
    found = check(driver, init(W))
    assert list(found.differences) == ["state[0]"]


def test_any_half_precision_driver_can_be_compared():
    """Random bits, loops, custom derivatives, checkpoints, embeddings: all are computed in double precision instead."""

    def loss(params, batch, keys):
        def one(key, x, y):
            x = x + jax.random.uniform(key, x.shape, x.dtype)
            h, _ = jax.lax.scan(lambda h, t: (jax.nn.gelu(h + t), None), jnp.zeros((), x.dtype), x * params["w"])
            which = jax.lax.cond(y > 0, lambda: 0, lambda: 1)
            return (jax.nn.relu(h) + params["rows"][which] - y) ** 2

        return jax.vmap(one)(keys, batch["x"].astype(jnp.bfloat16), batch["y"].astype(jnp.bfloat16)).mean()

    def driver(params, batch):
        grads = jax.grad(jax.checkpoint(loss))(params, batch, ad.example_keys())
        average = mon.ema(comm.all_reduce(grads))
        return jax.tree.map(lambda p, g: p - (0.1 * g).astype(p.dtype), params, average), {}

    half = {"w": W.astype(jnp.bfloat16), "rows": jnp.array([0.3, 0.7], jnp.bfloat16)}
    found = check(driver, half)
    assert found, found


def test_double_precision_is_compared_in_double_precision():
    with jax.enable_x64(True):
        data = {k: v.astype(np.float64) for k, v in DATA.items()}
        state = jnp.asarray(np.asarray(W, np.float64))

        def driver(state, batch):
            grads = jax.grad(mean_loss)(state, batch)
            odd = 1 + 1e-6 * (batch["y"].shape[0] % 2)
            return state - 0.1 * comm.all_reduce(odd * grads), {}

        def plain(state, batch):
            return state - 0.1 * comm.all_reduce(jax.grad(mean_loss)(state, batch)), {}

        assert check(plain, state, data=data)
        assert not check(driver, state, data=data)
        assert check(driver, state, data=data, tolerance=1e-3)


# --- models that are not ----------------------------------------------------------------------------------------------


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        return nn.Dense(1)(nn.tanh(x))[:, 0]


def test_batch_norm_is_found_in_parameters_and_statistics():
    variables = Normed().init(jax.random.key(0), jnp.zeros((2, FEATURES)))

    def driver(state, batch):
        def loss_fn(params):
            out, new = Normed().apply({**state, "params": params}, batch["x"], mutable=["batch_stats"])
            return jnp.mean((out - batch["y"]) ** 2), new["batch_stats"]

        grads, stats = jax.grad(loss_fn, has_aux=True)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], comm.all_reduce(grads))
        return {"params": params, "batch_stats": comm.all_reduce(stats)}, {}

    found = check(driver, variables)
    assert not found
    assert "state['params']['Dense_0']['kernel']" in found.differences
    assert "state['batch_stats']['BatchNorm_0']['var']" in found.differences
    assert "state['batch_stats']['BatchNorm_0']['mean']" not in found.differences  # a mean of means is the mean
    text = str(found)
    assert "not split-invariant" in text
    assert "batch normalization" in text
    assert all(name in text for name in (*found.differences, *found.reductions))


def contrastive(w, batch):
    """Compare each example with the others of its microbatch."""
    scores = (batch["x"] * w[None]) @ batch["x"].T
    return -jnp.mean(jax.nn.log_softmax(scores)[jnp.arange(len(scores)), jnp.arange(len(scores))])


def test_a_loss_that_is_a_sum_over_examples_is_found_on_one_worker():
    driver, init = train(lambda w, b: jnp.sum((b["x"] @ w - b["y"]) ** 2))
    found = check(driver, init(W), workers=1)
    assert not found
    assert list(found.differences) == ["state[0]"]
    assert all("all_reduce" in line for line in pointed_at(RuntimeError(str(found))))


# --- single elements --------------------------------------------------------------------------------------------------


def test_one_element_counts_beside_another_that_is_much_larger():
    """To Adam they are alike: of a gradient, the second element is normalized in calls, the first is 1e12 as large."""

    def loss(w, batch):
        x = batch["x"]
        x = x.at[:, 1].set((x[:, 1] - x[:, 1].mean()) / (x[:, 1].std() + 0.1))
        return jnp.mean((x[:, 1:] @ w[1:] - batch["y"]) ** 2) + 1e12 * jnp.mean(x[:, 0] * w[0] - batch["y"] * w[0])

    driver, init = train(loss, optax.adam(0.1))
    found = check(driver, init(W), global_batch=8)
    assert found.verdict == "no", found


def test_a_driver_that_cannot_run_in_double_precision_is_not_compared():
    """Bits of a number, taken as they are, are others in double precision."""

    def bits(x):
        return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.int32) | 1, jnp.float32)

    driver, init = train(lambda w, b: mean_loss(w, {**b, "x": bits(b["x"])}))
    found = check(driver, init(W))
    assert found.verdict == "not known"
    assert "cannot be computed in double precision: bitcast_convert_type" in str(found)


# --- decisions --------------------------------------------------------------------------------------------------------


def deciding(decide):
    """A driver that takes steps by what `decide` makes of a mean of maxima, and of the largest loss of all."""

    def driver(w, batch):
        losses = (batch["x"] @ w - batch["y"]) ** 2
        rate = decide(comm.all_reduce(losses.max()), comm.all_reduce(losses.max(), op="max"))
        return w - rate * comm.all_reduce(jax.grad(mean_loss)(w, batch)), {}

    return driver


@pytest.mark.parametrize(
    ("decide", "verdict"),
    [
        (lambda mean, most: jnp.where(mean > 1e6, 0.1, 0.2), "not known"),
        (lambda mean, most: jnp.where(jnp.isfinite(mean) & ~jnp.isnan(mean) & (most < 1e6), 0.1, 0.2), "yes"),
    ],
)
def test_a_difference_behind_a_comparison_is_not_known(decide, verdict):
    found = check(deciding(decide), W, global_batch=8)
    assert found.verdict == verdict, found
    assert bool(found) == (verdict == "yes")
    assert ("nothing that follows from it shows it" in str(found)) == (verdict == "not known")


# --- the number of workers --------------------------------------------------------------------------------------------


def averaged(state, batch):
    return comm.all_reduce(jax.grad(mean_loss)(state, batch))


def number():
    return ad.num_workers().astype(jnp.float32)


def with_a_rate(rate):
    return lambda state, batch: (state - jnp.float32(rate()) * averaged(state, batch), {})


@pytest.mark.parametrize(
    ("driver", "through", "workers"),
    [
        (
            lambda w, b: (w - 0.1 * comm.all_reduce(jax.grad(mean_loss)(w, b) / number()), {}),
            r"ad.num_workers\(\)",
            1,
        ),
        (
            lambda w, b: (w - 0.1 * comm.all_reduce(averaged(w, b), op="sum"), {}),
            r"all_reduce\(op='sum'\) of equal values",
            4,
        ),
    ],
    ids=["before the mean", "sum of a mean"],
)
def test_a_step_that_depends_on_the_number_of_workers_is_found_on_any_number(driver, through, workers):
    found = check(driver, W, workers=workers, global_batch=8)
    assert found.verdict == "no"
    assert set(found.by_workers) == {"state"}
    assert not found.differences
    assert re.search(rf"depends on the number of workers, through {through} \(test_invariance.py:\d+\)", str(found))


def test_the_number_of_workers_may_be_reported_but_not_decide():
    def reporting(state, batch):
        rows = comm.all_gather(mean_loss(state, batch))
        return descend(state, batch)[0], {"workers": ad.num_workers(), "rows": rows}

    assert check(reporting, W, workers=3, global_batch=8)
    found = check(with_a_rate(lambda: jnp.where(ad.num_workers() > 100, 0.1, 0.2)), W, global_batch=8)
    assert found.verdict == "not known"
    assert "the step reads ad.num_workers() (test_invariance.py:" in found.note


# --- monitors' means --------------------------------------------------------------------------------------------------


def host(x):
    """Return an array by way of the host."""
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_a_mean_that_is_not_that_of_the_gradient_beside_it_is_named():
    def driver(state, batch):
        grads = jax.grad(mean_loss)(state, batch)
        by_sums = comm.all_reduce((batch["y"].size * grads, jnp.float32(batch["y"].size)), op="sum")
        wrong = comm.all_reduce(2 * host(grads))
        means = {
            "narrow": comm.all_reduce(grads.astype(jnp.bfloat16)).astype(jnp.float32),
            "by sums": by_sums[0] / by_sums[1],
        }
        variances = {name: mon.gradient_variance(grads, mean) for name, mean in means.items()}
        variances["wrong"] = mon.gradient_variance(grads, wrong)
        return state - 0.1 * comm.all_reduce(grads), variances

    found = check(driver, W)
    assert found.verdict == "no"
    assert not found.differences
    ((name, difference),) = found.wrong_means.items()
    assert name.startswith("gradient_variance (test_invariance.py:")
    assert "wrong" in pointed_at(RuntimeError(name))[0]
    assert difference == pytest.approx(0.5)
    assert name in str(found)


# --- trials in which nothing happens ----------------------------------------------------------------------------------


def test_a_step_that_skips_its_examples_in_all_trials_is_not_known():
    def driver(state, batch):
        grads = jax.tree.map(lambda g: jnp.where(mean_loss(state, batch) > 0, 0, g), jax.grad(mean_loss)(state, batch))
        return 0.9 * state - 0.1 * comm.all_reduce(grads), {"loss": comm.all_reduce(mean_loss(state, batch))}

    found = check(driver, W)
    assert found.verdict == "not known"
    assert "are 0 in all trials" in found.note


# --- what a first step does not show ----------------------------------------------------------------------------------


def test_a_learning_rate_that_starts_at_zero_hides_nothing():
    driver, init = train(contrastive, optax.sgd(optax.linear_schedule(0.0, 0.1, 10)))
    found = check(driver, init(W), workers=3)
    assert found.verdict == "no"
    assert any("all_reduce(grads)" in line for line in pointed_at(RuntimeError(str(found))))


def test_a_dependence_that_begins_in_a_later_step_is_found():
    first = 12345

    def driver(state, batch):
        late = jax.grad(contrastive)(state, batch)
        grads = jnp.where(ad.step_number() >= first, late, jax.grad(mean_loss)(state, batch))
        return state - 0.1 * comm.all_reduce(grads), {}

    found = check(driver, W)
    assert not found
    assert found.steps[-1] >= first


@pytest.mark.filterwarnings("error")
def test_no_kind_of_collective_is_left_out():
    def driver(state, batch):
        grads = jax.grad(mean_loss)(state["w"], batch)
        votes = comm.all_reduce(jnp.sign(grads).astype(jnp.int32), op="sum")
        return {
            "w": state["w"],
            "broadcast": state["broadcast"] - comm.broadcast(grads),
            "majority": state["majority"] - jnp.sign(votes).astype(jnp.float32),
            "complex": state["complex"] - comm.all_reduce(grads.astype(jnp.complex64) * 1j, op="sum").imag,
        }, {}

    names = ("broadcast", "majority", "complex")
    found = check(driver, dict.fromkeys((*names, "w"), W), global_batch=12, seed=2)
    assert not found
    assert set(found.differences) == {f"state[{name!r}]" for name in names}
    assert len(found.reductions) == len(names)


# --- what is compared -------------------------------------------------------------------------------------------------


def test_a_batch_may_be_given():
    driver, init = train(lambda w, b: jnp.sum((b["x"] @ w - b["y"]) ** 2))
    nothing = {"x": np.zeros((5, FEATURES), np.float32), "y": np.zeros(5, np.float32)}
    found = check(driver, init(W), batch=nothing)
    assert not found.differences  # a sum of zeros is a mean of zeros
    assert "are 0 in all trials" in found.note
    assert all(sum(map(sum, split)) == 5 for split in found.splits)
    with pytest.raises(ad.DataError, match="the structure of batch is"):
        check(driver, init(W), batch={"x": nothing["x"]})


@pytest.mark.parametrize(("workers", "global_batch"), [(1, 1), (2, 2)])
def test_nothing_is_known_where_nothing_can_be_split(workers, global_batch):
    driver, init = train(mean_loss)
    found = check(driver, init(W), workers=workers, global_batch=global_batch)
    assert not found
    assert found.verdict == "not known"
    assert "cannot be split" in str(found)


def test_nothing_is_known_where_no_example_counts():
    found = check(lambda state, batch: (state + 1, {"sizes": comm.all_gather(ad.batch_size())}), 0)
    assert found.verdict == "not known"
    assert "do not depend on examples" in str(found)


def test_values_that_are_not_finite_are_not_known():
    driver, init = train(lambda w, b: mean_loss(w, b) / 0.0 * 0.0)
    found = check(driver, init(W))
    assert not found
    assert found.verdict == "not known"
    assert "is not finite" in str(found)


def test_a_value_that_is_finite_in_some_splits_only_depends_on_the_split():
    driver, init = train(lambda w, b: mean_loss(w, b) * (1 if len(b["y"]) > 1 else jnp.nan))
    assert check(driver, init(W)).verdict == "no"


def test_a_driver_that_cannot_be_split_is_compared_over_workers_alone():
    def driver(state, batch):
        rows = comm.all_gather(batch["y"].mean())
        return descend(state, batch, rows=rows)

    found = check(driver, W, workers=3)
    assert found
    assert all(len(microbatches) == 1 for split in found.splits for microbatches in split)
    alone = check(driver, W, workers=1)
    assert not alone
    assert "nothing to compare on one worker: all_gather" in str(alone)


def test_per_worker_state_is_not_compared_but_values_computed_from_it_are():
    def driver(state, batch):
        grads = jax.grad(mean_loss)(state["w"], batch)
        momentum = 0.9 * state["m"] + grads
        sent = momentum if averaged else grads
        return {"w": state["w"] - 0.1 * comm.all_reduce(sent), "m": momentum}, {}

    for averaged in (False, True):
        found = check(driver, {"w": W, "m": jnp.zeros(FEATURES)}, per_worker_state=lambda state: state["m"])
        assert bool(found) == (not averaged)
        assert list(found.differences) == ["state['w']"] * averaged


def test_checking_changes_nothing():
    def driver(state, batch):
        smooth = mon.ema(comm.all_reduce(batch["y"].mean()))
        operators.hook("watch", watched, (smooth,))
        return state - 0.1 * comm.all_reduce(jax.grad(mean_loss)(state, batch)), {"smooth": smooth}

    runs = []
    for checked in (False, True):
        watched = Recorder()
        with ad.Program(driver, W, DATA, global_batch=4, world=LocalWorld(2), deterministic=True) as program:
            reports = [program.step()]
            if checked:
                assert program.check()
                assert len(watched.seen) == 1
            reports += [program.step() for _ in range(2)]
            runs.append(([float(r.metrics["smooth"]) for r in reports], np.asarray(program.state).tolist()))
    assert runs[0] == runs[1]
