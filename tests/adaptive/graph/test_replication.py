"""Which values are replicated, and drivers refused because workers can differ or a batch cannot be split."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive import operators
from adaptive.check.widen import paired
from adaptive.graph.flow import Scope
from adaptive.operators.replication_claims import assert_mean, assert_scope
from adaptive.operators.sources import Source, read
from tests.adaptive.drivers import FEATURES, Recorder, mean_loss, planned, pointed_at, traced

W = jnp.zeros(FEATURES)
SECONDS = Source("seconds", lambda r: r.compute_seconds)
grad = jax.grad(mean_loss)


def op_state(label, value, update=lambda old, new: 0.9 * old + 0.1 * new):
    return operators.operator_state(label, np.zeros(()), lambda old: (update(old, value), update(old, value)))


# --- operator states --------------------------------------------------------------------------------------------------


def test_an_average_of_replicated_values_is_replicated():
    def driver(state, batch):
        smooth = op_state("ema", comm.all_reduce(batch["y"].mean()))
        return state + smooth, {"again": op_state("ema", smooth)}

    plan = planned(driver, 0.0)
    assert [(s.name, s.scope) for s in plan.op_states] == [("ema/0", Scope.ALL), ("ema/1", Scope.ALL)]
    assert len(plan.messages) == 1
    assert [a.shape for a in plan.op_states[0].init] == [()]


def test_an_average_of_a_local_measurement_belongs_to_its_worker():
    def driver(state, batch):
        smooth = op_state("ema", read(SECONDS))
        return state, {"all": comm.all_gather(smooth)}

    plan = planned(driver, 0.0)
    assert [s.scope for s in plan.op_states] == [Scope.WORKER]
    assert [c.scope for c in plan.messages[0]] == [Scope.WORKER]
    with pytest.raises(ad.ReplicationError, match=r"\['smooth'\] .*('seconds'|a moving average)"):
        planned(lambda s, b: (s, {"smooth": op_state("ema", read(SECONDS))}), 0.0)


def test_an_operator_state_of_a_microbatch_value_is_refused():
    def driver(state, batch):
        op_state("ema", batch["y"].mean())
        return state, {}

    with pytest.raises(ad.ReplicationError, match=r"operator state 'ema' .*Reduce it first") as error:
        planned(driver, 0.0)
    assert "this worker's examples" in str(error.value)
    assert pointed_at(error.value)


# --- what must be replicated ------------------------------------------------------------------------------------------


def without_a_hint(grads):
    return assert_scope("local", grads, "own")


@pytest.mark.parametrize(
    ("monitor", "says"),
    [
        (mon.nonfinite, ["nonfinite (test_replication.py:", "already averaged", "share = mon.nonfinite(grads)"]),
        (without_a_hint, ["own (test_replication.py:", "Pass the value before its reduction."]),
    ],
)
def test_the_error_for_an_argument_of_a_wrong_scope_has_the_hint_of_its_monitor(monitor, says):
    def driver(state, batch):
        monitor(comm.all_reduce(grad(state, batch)))
        return state, {}

    with pytest.raises(ad.CollectiveError) as error:
        planned(driver, W)
    assert all(text in str(error.value) for text in says)
    assert "(grads, avg_grads)" not in str(error.value)  # the call of another monitor


def normalized(x):
    mean, square = jax.lax.pmean((x.mean(), (x * x).mean()), "workers")
    return (x - mean) * jax.lax.rsqrt(square - mean * mean + 1e-5)


def normalized_by_hand(x):
    @jax.custom_vjp
    def mean(x):
        return comm.all_reduce(x.mean())

    mean.defvjp(lambda x: (mean(x), x), lambda x, ct: (jnp.full_like(x, comm.all_reduce(ct) / x.size),))
    return x - mean(x)


@pytest.mark.parametrize(
    ("monitor", "normalize"),
    [
        (mon.noise_scale, normalized),
        (mon.gradient_variance, jax.jit(normalized)),
        (partial(mon.noise_scale, islands=[[0, 1]]), normalized_by_hand),
    ],
    ids=["pmean", "jit", "custom_vjp"],
)
def test_gradients_that_batch_normalization_couples_have_no_noise_scale(monitor, normalize):
    def driver(w, batch):
        grads = jax.grad(lambda w: (normalize(w * batch["y"]) ** 3).mean())(w)
        avg = comm.all_reduce(grads)
        monitor(grads, avg)
        return w - avg, {}

    with pytest.raises(
        ad.CollectiveError, match=r"\(test_replication.py:\d+\) needs gradients that are independent"
    ) as e:
        planned(driver, 0.5)
    assert "docs/models.md" in str(e.value)


@pytest.mark.parametrize("uses", ["a frozen mean", "a second gradient", "the last layer"])
def test_gradients_that_use_reduced_values_without_coupling_have_a_noise_scale(uses):
    def driver(w, batch):
        def loss(w, w2=1.0):
            x = w * batch["y"] + 1
            if uses == "a frozen mean":
                return ((x - jax.lax.stop_gradient(jax.lax.pmean(x.mean(), "workers"))) ** 2).mean()
            if uses == "the last layer":
                return (w2 * normalized(x) ** 3).mean()
            return (x**2).mean()

        grads = jax.grad(loss)(w)
        if uses == "a second gradient":  # as of sharpness-aware minimization
            grads = jax.grad(loss)(w + 0.1 * comm.all_reduce(grads))
        if uses == "the last layer":
            grads = jax.grad(loss, argnums=1)(w, 1.0)
        avg = comm.all_reduce(grads)
        return w - avg, mon.noise_scale(grads, avg)

    planned(driver, 0.5)


def test_a_gradient_that_was_not_reduced_is_found_in_the_state():
    def driver(state, batch):
        grads = grad(state["w"], batch)
        w = state["w"] - 0.1 * grads
        return {"step": state["step"] + 1, "w": w}, {}

    with pytest.raises(ad.ReplicationError) as error:
        planned(driver, {"step": 0, "w": W})
    text = str(error.value)
    assert "state['w']" in text
    assert "state['step']" not in text
    assert "grads = comm.all_reduce(grads)" in text
    made, local = pointed_at(error.value)
    assert made == 'w = state["w"] - 0.1 * grads'
    assert "batch[" in local  # in mean_loss, where the gradient comes from


class Noise(NamedTuple):
    scale: jax.Array
    trace: jax.Array


def test_a_hook_that_reads_a_local_value_is_refused_with_name_and_line():
    def driver(state, batch):
        noise = Noise(batch["y"].mean(), comm.all_reduce(batch["y"].mean()))
        operators.hook("adapt", Recorder(), (ad.step_number(), noise))
        return state, {}

    with pytest.raises(ad.ReplicationError, match=r"hook 'adapt' .*its value_1\.scale, which") as error:
        planned(driver, 0.0)
    assert "comm.all_reduce(x)" in str(error.value)
    assert "comm.all_gather(x)" in str(error.value)
    hook_line, made_line = pointed_at(error.value)
    assert hook_line.startswith("operators.hook")
    assert "batch[" in made_line


def test_a_hook_that_reads_random_keys_is_refused_with_name_and_line():
    def driver(state, batch):
        operators.hook("adapt", Recorder(), (ad.step_number(), ad.step_key()))
        return state, {}

    with pytest.raises(ad.DriverError, match=r"hook 'adapt' .*reads random keys, value_1; .*key_data\(value_1\)"):
        planned(driver, 0.0)


def test_a_hook_may_read_all_that_is_replicated():
    recorder = Recorder()

    def driver(state, batch):
        operators.hook("adapt", recorder, (comm.all_gather(read(SECONDS)), state, ad.global_batch(), 1.0), every=3)
        return state, {}

    (hook,) = planned(driver, 0.0).hooks
    assert (hook.hook.name, hook.hook.every, hook.hook.handler) == ("adapt", 3, recorder)
    assert [a.aval.shape for a in hook.values] == [(2,), (), (), ()]
    assert "test_replication.py:" in hook.line


@pytest.mark.parametrize(
    ("value", "sources"),
    [
        (
            lambda s, b: 2.0 * (comm.all_gather(read(SECONDS)) + ad.step_number().astype(float)) - 1.0,
            {"seconds", "step"},
        ),
        (lambda s, b: comm.all_gather(read(SECONDS)) * np.float32([3, 4]), {"seconds"}),
        (lambda s, b: s + comm.all_gather(read(SECONDS)), set()),
        (lambda s, b: comm.all_gather(read(SECONDS)) + comm.all_reduce(b["y"].mean()), set()),
        (lambda s, b: comm.all_gather(op_state("ema", read(SECONDS))), set()),
    ],
)
def test_a_handler_knows_what_its_values_are_measured_by(value, sources):
    class Asking(Recorder):
        def check(self, values, n_workers):
            known.append((values, n_workers))

    def driver(state, batch):
        operators.hook("adapt", Asking(), (value(state, batch), {"n": ad.global_batch()}))
        return state, {}

    known = []
    planned(driver, 0.0, workers=2)
    (((measured, others), n_workers),) = known
    assert (measured.shape, measured.dtype, measured.sources) == ((2,), np.float32, sources)
    assert (others["n"].shape, others["n"].dtype, others["n"].sources) == ((), np.int32, {"global_batch"})
    assert n_workers == 2


def test_a_local_metric_is_refused_by_name():
    with pytest.raises(
        ad.ReplicationError, match=r"metric \['loss'\]\['train'\] .* can differ .*this worker's examples"
    ):
        planned(lambda s, b: (s, {"loss": {"train": b["y"].mean()}}), 0.0)


def test_state_may_be_local_if_declared():
    def driver(state, batch):
        shared, own = state
        own = own - 0.1 * grad(own, batch)
        return (shared + comm.all_reduce(own, weight=1.0), own), {}

    with pytest.raises(ad.ReplicationError, match=r"state\[1\]"):
        planned(driver, (W, W))
    plan = planned(driver, (W, W), local_state=[1])
    assert plan.local_state == {1}
    assert [c.scope for c in plan.messages[0]] == [Scope.MICROBATCH]
    assert not plan.splittable


VALUES = {
    "known": lambda s, b: 2 * s,
    "reduced": lambda s, b: comm.all_reduce(b["y"].mean()),
    "measured": lambda s, b: read(SECONDS),
    "examples": lambda s, b: b["y"].mean(),
    "sometimes": lambda s, b: comm.all_reduce(b["y"].mean(), when=ad.step_number() == 3),
}


@pytest.mark.parametrize(
    ("claim", "holds", "says"),
    [
        ("local", {"measured", "examples", "sometimes"}, "already averaged, or otherwise replicated"),
        ("reduced", {"known", "reduced"}, "its argument can differ between them"),
        ("before", {"known"}, "known before the step|can differ between them"),
        ("replicated", {"known", "reduced", "measured", "sometimes"}, "It differs between microbatches"),
    ],
)
@pytest.mark.parametrize("value", VALUES)
def test_a_claim_holds_or_is_refused_with_its_line(claim, holds, says, value):
    def driver(state, batch):
        assert_scope(claim, VALUES[value](state, batch), "mine")
        return state + 1, {}

    if value in holds:
        planned(driver, 0.0)
    else:
        with pytest.raises((ad.CollectiveError, ad.ReplicationError), match=says) as error:
            planned(driver, 0.0)
        assert "assert_scope" in pointed_at(error.value)[0]
    if (claim, value) == ("before", "reduced"):
        assert "depends on a reduction of the same step" in str(error.value)


ONE = jax.ShapeDtypeStruct((), jnp.float32)


@pytest.mark.parametrize(
    ("own", "cause"),
    [
        (lambda mean, s: comm.all_reduce(mean, when=ad.step_number() % 2 == 0), "all_reduce, whose result differs"),
        (lambda mean, s: comm.neighbor_mean(mean, "ring"), "neighbor_mean, whose result differs"),
        (lambda mean, s: comm.local_mean(mean), "local_mean, whose result differs"),
        (lambda mean, s: assert_scope("local", mean, "own"), "this worker's examples"),
        (lambda mean, s: jax.pure_callback(np.sin, ONE, s), "the host"),
        (lambda mean, s: jax.pure_callback(np.sin, ONE, comm.all_reduce(mean)), "the host"),
        (lambda mean, s: comm.all_reduce(mean) + comm.all_reduce(read(SECONDS)) * read(SECONDS), "'seconds'"),
    ],
)
def test_what_can_differ_between_workers_is_no_state_of_all(own, cause):
    def driver(state, batch):
        mean = batch["y"].mean()
        return (state[0] + comm.all_reduce(mean), state[1] + own(mean, state[0])), {}

    with pytest.raises(ad.ReplicationError, match=rf"state\[1\].* comes from {cause}"):
        planned(driver, (0.0, 0.0))
    if "examples" not in cause:
        assert planned(driver, (0.0, 0.0), local_state=[1]).local_state == {1}


@pytest.mark.parametrize(
    "same",
    [
        lambda mean, s: ad.replicated(jax.pure_callback(np.sin, ONE, s)),
        lambda mean, s: ad.replicated(jax.pure_callback(np.sin, ONE, comm.all_reduce(mean))),
        lambda mean, s: ad.replicated(read(SECONDS)),
        lambda mean, s: comm.broadcast(read(SECONDS)),
        lambda mean, s: comm.all_reduce(comm.local_mean(mean)),
        lambda mean, s: comm.all_reduce(assert_scope("local", mean, "own")),
    ],
)
def test_what_is_the_same_on_all_workers_is(same):
    def driver(state, batch):
        return state + same(batch["y"].mean(), state), {}

    assert not planned(driver, 0.0).local_state


def test_only_claims_of_a_mean_are_pairs():
    def driver(state, batch):
        own, mean = grad(state, batch), comm.all_reduce(grad(state, batch))
        assert_scope("reduced", mean, "mine")
        assert_scope("independent", own, "mine")
        assert_mean(own, mean, "theirs")
        return state - mean, {}

    ((local, reduced),) = paired(traced(driver, W))
    assert (local.params["what"], reduced.params["what"]) == ("theirs", "theirs")


# --- what cannot be split ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("collective", "name"), [(comm.all_gather, "all_gather"), (comm.broadcast, "broadcast")])
def test_gathering_rows_of_a_local_batch_keeps_it_in_one_microbatch(collective, name):
    def driver(state, batch):
        rows = collective({"mean": batch["y"].mean()})
        return state + rows["mean"].sum(), {}

    (reason,) = planned(driver, 0.0).unsplittable
    assert reason.startswith(name)
    assert "['mean']" in reason
    assert "test_replication.py:" in reason


def test_a_sum_scaled_by_the_local_batch_size_keeps_it_in_one_microbatch():
    """In several calls each would be scaled by the size of all of them."""

    def driver(state, batch):
        scaled = batch["y"].mean() * ad.batch_size().astype(float)
        return state + comm.all_reduce(scaled, op="sum"), {}

    (reason,) = planned(driver, 0.0).unsplittable
    assert "ad.batch_size()" in reason
    assert "ad.microbatch_size()" in reason
    assert planned(
        lambda s, b: (s + comm.all_reduce(b["y"].sum() * ad.step_number().astype(float), op="sum"), {}), 0.0
    ).splittable


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (lambda b: ad.batch_size(), "would have the same weight in all microbatches"),
        (lambda b: ad.batch_size().astype(float) * b["y"].sum(), "depends on ad.batch_size()"),
        (lambda b: ad.microbatch_size(), ""),
        (lambda b: b["y"].sum(), ""),
        (lambda b: ad.microbatch_size().astype(float) / comm.all_gather(ad.batch_size()).sum().astype(float), ""),
    ],
)
def test_a_weight_that_belongs_to_all_of_a_local_batch_keeps_it_in_one_microbatch(weight, reason):
    def driver(state, batch):
        mean = comm.all_reduce(read(SECONDS), weight=ad.batch_size())  # both belong to the worker
        return state + comm.all_reduce(batch["y"].mean(), weight=weight(batch)), {"mean": mean}

    found = planned(driver, 0.0).unsplittable
    assert len(found) == bool(reason)
    assert all(reason in text and "test_replication.py:" in text for text in found)


# --- advice for leaves of the state -----------------------------------------------------------------------------------


def advice_for(driver, state):
    with pytest.raises(ad.ReplicationError) as caught:
        planned(driver, state)
    return str(caught.value)


def the_loss(w, batch):
    return ((batch["x"] @ w - batch["y"]) ** 2).mean()


@pytest.mark.parametrize("trained", [False, True])
def test_state_of_an_environment_is_advised_to_be_the_workers_own(trained):
    def driver(state, batch):
        w = state["w"] - 0.1 * comm.all_reduce(jax.grad(the_loss)(state["w"], batch))
        carry = jnp.tanh(state["carry"] + batch["x"][-1] * (w if trained else 1))
        return {"w": w, "carry": carry}, {}

    said = advice_for(driver, {"w": W, "carry": jnp.zeros(3)})
    assert "environment" in said
    assert "per_worker_state=lambda state: state['carry']" in said
