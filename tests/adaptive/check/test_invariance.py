"""`check` tells models whose step depends on the split from those whose does not, and names what differs."""

from __future__ import annotations

import itertools

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


def trained(loss_fn, tx=optax.sgd(0.1), params=W):  # noqa: B008
    """A driver and its state, for `check(*…)`."""
    driver, init = train(loss_fn, tx)
    return driver, init(params)


def gradient(w, batch):
    return comm.all_reduce(jax.grad(mean_loss)(w, batch))


def descend(w, batch, **metrics):
    """A driver's results: a step that is split-invariant, and some metrics."""
    return w - 0.1 * gradient(w, batch), metrics


def scaled_by(rate):
    return lambda w, batch: (w - jnp.float32(rate(w, batch)) * gradient(w, batch), {})


def maxima(w, batch):
    """The mean of the calls' largest losses, which depends on the split, and the largest loss of all."""
    largest = ((batch["x"] @ w - batch["y"]) ** 2).max()
    return comm.all_reduce(largest), comm.all_reduce(largest, op="max")


# --- steps that do not depend on the split ----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_a_mean_loss_is_invariant_under_any_number_of_workers(workers):
    found = check(*trained(mean_loss), workers=workers)
    assert found
    assert found.verdict == "yes"
    assert found.differences == found.reports == found.reductions == found.wrong_means == {}
    assert len(found.splits) == 3
    slots = max(2, workers)  # a lone worker's step is also tried on two
    assert all(len(split) == slots and sum(map(sum, split)) == 4 for split in found.splits)
    assert str(found).startswith("split-invariant: 3 random splits of 4 examples")


def test_reports_may_show_the_split_and_values_of_single_examples():
    ticks = itertools.count()
    clock = Source("clock", lambda reading: next(ticks))

    def driver(state, batch):
        grads, error = jax.grad(mean_loss)(state, batch), jnp.abs(batch["x"] @ state - batch["y"])
        average, tokens = comm.all_reduce(grads), jnp.sum(error > 0.5).astype(jnp.float32)
        noise, rows = mon.noise_scale(grads, average), comm.all_gather(error.mean())
        ctrl.hook(lambda control, noise: None, noise, every=20)
        ctrl.hook(ctrl.balance(), comm.all_gather(mon.compute_seconds()), every=10)
        by_token = jnp.sum(jnp.where(error > 0.5, error, 0)) / jnp.maximum(tokens, 1)
        seen = {
            "smooth": mon.ema(noise.trace),
            "variance": mon.gradient_variance(grads, average),
            "largest": comm.all_reduce(ad.batch_size(), op="max"),
            "workers": ad.num_workers(),
            "cpu": comm.all_gather(mon.cpu_available()),
            "rows": rows,
            "most": comm.all_reduce(jnp.max(error), op="max"),
            "right": comm.all_reduce(jnp.sum(error < 1), op="sum"),
            "by token": comm.all_reduce(by_token, weight=tokens),
            "spectrum": comm.all_reduce(jnp.fft.fft(batch["x"], axis=1).sum(0), op="sum"),
        }
        # What measures the machine is held fixed, and all finite values pass a test for them.
        new = state - 0.1 * average + comm.all_reduce(read(clock))
        return jnp.where(jnp.isnan(rows).any() | ~jnp.isfinite(maxima(state, batch)[0]), state, new), seen

    found = check(driver, W, global_batch=8)
    assert found, found


def bfloat16_driver(params, batch):
    """Random bits, loops, custom derivatives, checkpoints, embeddings: all are computed in double precision instead."""

    def loss(params, batch, keys):
        def one(key, x, y):
            x = x + jax.random.uniform(key, x.shape, x.dtype)
            h, _ = jax.lax.scan(lambda h, t: (jax.nn.gelu(h + t), None), jnp.zeros((), x.dtype), x * params["w"])
            which = jax.lax.cond(y > 0, lambda: 0, lambda: 1)
            return (jax.nn.relu(h) + params["rows"][which] - y) ** 2

        return jax.vmap(one)(keys, batch["x"].astype(jnp.bfloat16), batch["y"].astype(jnp.bfloat16)).mean()

    average = mon.ema(comm.all_reduce(jax.grad(jax.checkpoint(loss))(params, batch, ad.example_keys())))
    return jax.tree.map(lambda p, g: p - (0.1 * g).astype(p.dtype), params, average), {}


def shifted(params, batch):
    """The gradient of the shift is zero but for rounding errors, which Adam magnifies."""
    logits = jnp.round(3 * batch["x"]) * params["w"][None] + params["shift"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, (batch["y"] > 0).astype(jnp.int32)).mean()


@pytest.mark.parametrize(
    ("driver", "state"),
    [
        trained(lambda w, b: 1e-9 * mean_loss(w, b), optax.adam(0.1, eps=1e-30)),  # a first step as for a gradient of 1
        trained(shifted, optax.adam(0.1), {"w": jnp.ones(FEATURES), "shift": 0.0}),
        (bfloat16_driver, {"w": W.astype(jnp.bfloat16), "rows": jnp.array([0.3, 0.7], jnp.bfloat16)}),
        (scaled_by(lambda w, b: jnp.where(maxima(w, b)[1] < 1e6, 0.1, 0.2)), W),
    ],
    ids=["tiny gradients under Adam", "gradients of rounding errors", "half precision", "the largest of all"],
)
def test_rounding_gives_no_false_alarm(driver, state):
    found = check(driver, state, global_batch=8)
    assert found, found


def test_double_precision_is_compared_in_double_precision():
    with jax.enable_x64(True):
        data = {k: v.astype(np.float64) for k, v in DATA.items()}
        state = jnp.asarray(np.asarray(W, np.float64))

        def driver(state, batch):
            grads = jax.grad(mean_loss)(state, batch)
            return state - 0.1 * comm.all_reduce((1 + 1e-6 * (batch["y"].shape[0] % 2)) * grads), {}

        assert check(descend, state, data=data)
        assert not check(driver, state, data=data)
        assert check(driver, state, data=data, tolerance=1e-3)


# --- steps that do ----------------------------------------------------------------------------------------------------


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
    assert found.verdict == "no"
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


def normalized_beside_a_large_feature(w, batch):
    """To Adam the second gradient, which is normalized in calls, is as large as the first, of 1e12."""
    x = batch["x"]
    x = x.at[:, 1].set((x[:, 1] - x[:, 1].mean()) / (x[:, 1].std() + 0.1))
    return jnp.mean((x[:, 1:] @ w[1:] - batch["y"]) ** 2) + 1e12 * jnp.mean(x[:, 0] * w[0] - batch["y"] * w[0])


def in_low_precision(w, batch):
    x, y, w = (a.astype(jnp.float8_e4m3fn) for a in (batch["x"], batch["y"], w))
    return (1 + 0.05 * (len(y) % 2)) * jnp.mean(((x @ w - y) ** 2).astype(jnp.float32))


def with_dropout(w, batch):
    keys = jax.random.split(ad.step_key(), batch["y"].shape[0])
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (FEATURES,)))(keys)
    return mean_loss(w, {**batch, "x": batch["x"] * keep.astype(float)})


@pytest.mark.parametrize(
    ("loss", "tx", "workers"),
    [
        (lambda w, b: jnp.sum((b["x"] @ w - b["y"]) ** 2), optax.sgd(0.1), 1),
        (contrastive, optax.sgd(optax.linear_schedule(0.0, 0.1, 10)), 3),  # hides the state's change in the first step
        (normalized_beside_a_large_feature, optax.adam(0.1), 2),
        (in_low_precision, optax.sgd(0.1), 2),
        (with_dropout, optax.sgd(0.1), 2),
        (lambda w, b: mean_loss(w, b) * (1 if len(b["y"]) > 1 else jnp.nan), optax.sgd(0.1), 2),
    ],
    ids=["a sum", "a rate that starts at zero", "beside a large one", "five percent", "keys by index", "NaN for one"],
)
def test_a_loss_that_is_no_mean_of_its_examples_is_found(loss, tx, workers):
    found = check(*trained(loss, tx), workers=workers, global_batch=8)
    assert found.verdict == "no", found
    assert any("all_reduce(grads)" in line for line in pointed_at(RuntimeError(str(found))))


def total_before(value):
    """Add up a value over the steps, and return the sum over the steps before."""
    return operators.operator_state("total", np.zeros(()), lambda old: (old + value, old))


@pytest.mark.filterwarnings("error")
def test_every_way_into_the_state_is_followed():
    def driver(state, batch):
        grads = jax.grad(mean_loss)(state["w"], batch)
        votes = comm.all_reduce(jnp.sign(grads).astype(jnp.int32), op="sum")
        square = comm.all_reduce(jnp.sum(grads**2))  # the mean of squares is not the square of the mean
        changes = {
            "w": -0.1 * comm.all_reduce(grads),
            "square": square,
            "later": total_before(total_before(square)),
            "broadcast": comm.broadcast(grads),
            "majority": jnp.sign(votes).astype(jnp.float32),
            "complex": comm.all_reduce(grads.astype(jnp.complex64) * 1j, op="sum").imag,
            "rows": comm.all_gather(ad.batch_size()).max().astype(jnp.float32),
            "noise": mon.gradient_variance(grads, comm.all_reduce(grads)),
        }
        return {name: state[name] + change for name, change in changes.items()}, {"total": total_before(3 * square)}

    vectors, scalars = ("broadcast", "majority", "complex"), ("square", "rows", "noise")
    state = {**dict.fromkeys(("w", *vectors), W), **dict.fromkeys((*scalars, "later"), 0.0)}
    found = check(driver, state, global_batch=12, seed=2)
    leaves = {f"state[{name!r}]" for name in (*vectors, *scalars)}
    assert set(found.differences) == {*leaves, "operator state 'total/0'"}  # of which the state of a later step is made
    assert set(found.reports) == {"operator state 'total/2'"}
    assert any("square = comm.all_reduce" in pointed_at(RuntimeError(line))[0] for line in found.reductions)


def test_metrics_and_hook_values_are_compared():
    def driver(state, batch):
        apart = jnp.exp(5 * mean_loss(state, batch))
        operators.hook("watch", Recorder(), (state, {"apart": comm.all_reduce(apart)}))
        by_hand = comm.all_reduce(ad.microbatch_size().astype(float) * apart, op="sum")
        rows = comm.all_gather(mean_loss(state, batch))
        return descend(state, batch, by_hand=by_hand, rows=rows.mean(), right=comm.all_reduce(batch["y"].mean()))

    found = check(driver, W)
    assert found.verdict == "no"
    assert found.differences == {}
    assert set(found.reports) == {"hook 'watch', values[1]['apart']", "metric ['by_hand']", "metric ['rows']"}
    assert all(name in str(found) for name in (*found.reports, *found.reductions, "by all_gather"))


def test_a_dependence_that_begins_in_a_later_step_is_found():
    first = 12345

    def driver(state, batch):
        late = jax.grad(contrastive)(state, batch)
        grads = jnp.where(ad.step_number() % 99999 == first, late, jax.grad(mean_loss)(state, batch))
        return state - 0.1 * comm.all_reduce(grads), {}

    found = check(driver, W)
    assert found.verdict == "no"
    assert found.steps[-1] == first


@pytest.mark.parametrize(
    ("driver", "through", "workers"),
    [
        (
            lambda w, b: (w - 0.1 * comm.all_reduce(jax.grad(mean_loss)(w, b) / ad.num_workers().astype(float)), {}),
            "ad.num_workers() (test_invariance.py:",
            1,
        ),
        (
            lambda w, b: (w - 0.1 * comm.all_reduce(gradient(w, b), op="sum"), {}),
            "all_reduce(op='sum') of equal values (test_invariance.py:",
            4,
        ),
    ],
    ids=["before the mean", "a sum of a mean"],
)
def test_a_step_that_depends_on_the_number_of_workers_is_found_on_any_number(driver, through, workers):
    found = check(driver, W, workers=workers, global_batch=8)
    assert found.verdict == "no"
    assert set(found.differences) == {"state"}
    assert f"depends on the number of workers, through {through}" in str(found)


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
    assert f"{name}   by 0.5 of its value" in str(found)


# --- what is not known ------------------------------------------------------------------------------------------------


def chaotic(state, batch):
    x = comm.all_reduce(batch["x"].mean())
    for _ in range(40):
        x = jnp.sin(50 * x) + 0.3
    return state + comm.all_reduce(x * batch["y"].mean()), {}


def of_differences_that_cancel(state, batch):
    """The variance within calls and that between them are not invariant; their sum is."""
    y = batch["y"]
    within, mean = comm.all_reduce(jnp.var(y)), comm.all_reduce(y.mean())
    return state + within + comm.all_reduce((y.mean() - mean) ** 2), {}


def without_examples(w, batch):
    grads = jax.tree.map(lambda g: jnp.where(mean_loss(w, batch) > 0, 0, g), jax.grad(mean_loss)(w, batch))
    return 0.9 * w - 0.1 * comm.all_reduce(grads), {"loss": comm.all_reduce(mean_loss(w, batch))}


def by_bits(w, batch):
    odd = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(batch["x"], jnp.int32) | 1, jnp.float32)
    return descend(w, {**batch, "x": odd})


HIDDEN = "nothing that follows from it shows it"


@pytest.mark.parametrize(
    ("driver", "state", "text"),
    [
        (chaotic, 0.0, "rounding alone moves a value (test_invariance.py:"),
        (of_differences_that_cancel, 0.0, HIDDEN),
        (scaled_by(lambda w, b: jnp.where(maxima(w, b)[0] > 1e6, 0.1, 0.2)), W, HIDDEN),
        (scaled_by(lambda w, b: jnp.where(ad.num_workers() > 99, 0.1, 0.2)), W, "the step reads ad.num_workers()"),
        (scaled_by(lambda w, b: jnp.nan), W, "state is not finite"),
        (scaled_by(lambda w, b: 0.0), W, "the state does not change"),
        (without_examples, W, "are 0 in all trials"),
        (by_bits, W, "cannot be computed in double precision: bitcast_convert_type"),
        (lambda s, b: (s + 1, {"sizes": comm.all_gather(ad.batch_size())}), 0, "do not depend on examples"),
    ],
    ids=["chaos", "cancels", "a comparison", "workers", "not finite", "no rate", "skipped", "bits", "no examples"],
)  # fmt: skip
def test_what_is_not_known_is_said_with_the_reason(driver, state, text):
    found = check(driver, state, global_batch=8)
    assert not found
    assert found.verdict == "not known", found
    assert text in found.note
    assert str(found) == f"not known whether the step is split-invariant: {found.note}"


@pytest.mark.parametrize(("workers", "global_batch"), [(1, 1), (2, 2)])
def test_nothing_is_known_where_nothing_can_be_split(workers, global_batch):
    found = check(*trained(mean_loss), workers=workers, global_batch=global_batch)
    assert found.verdict == "not known"
    assert "cannot be split" in str(found)


# --- what is compared -------------------------------------------------------------------------------------------------


def test_a_batch_may_be_given():
    driver, state = trained(lambda w, b: jnp.sum((b["x"] @ w - b["y"]) ** 2))
    nothing = {"x": np.zeros((5, FEATURES), np.float32), "y": np.zeros(5, np.float32)}
    found = check(driver, state, batch=nothing)
    assert not found.differences  # a sum of zeros is a mean of zeros
    assert "are 0 in all trials" in found.note
    assert all(sum(map(sum, split)) == 5 for split in found.splits)
    with pytest.raises(ad.DataError, match="the structure of batch is"):
        check(driver, state, batch={"x": nothing["x"]})


def test_a_driver_that_cannot_be_split_is_compared_over_workers_alone():
    def driver(state, batch):
        return descend(state, batch, rows=comm.all_gather(batch["y"].mean()))

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
        jax.debug.callback(lambda mean: logged.append(float(mean)), smooth)
        return state - 0.1 * gradient(state, batch), {"smooth": smooth}

    runs = []
    for checked in (False, True):
        watched, logged = Recorder(), []
        with ad.Program(driver, W, DATA, global_batch=4, world=LocalWorld(2), deterministic=True) as program:
            reports = [program.step()]
            if checked:
                assert program.check()
                jax.effects_barrier()
                assert len(watched.seen) == 1
                assert len(logged) == 2  # of two workers
            reports += [program.step() for _ in range(2)]
            runs.append(([float(r.metrics["smooth"]) for r in reports], np.asarray(program.state).tolist()))
    assert runs[0] == runs[1]
