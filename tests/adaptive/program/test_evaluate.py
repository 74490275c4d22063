"""Means over a data set are exact: every example counts once, whatever the batches and the workers."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clu import metrics as clu
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import adaptive as ad
import collectives as comm
from adaptive.check.means import MeanCheck
from adaptive.program.evaluate import evaluate
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import make_data, mean_loss
from tests.threaded_world import Job

W = np.array([0.3, -0.2, 0.1], np.float32)


def means(w, batch):
    apart = batch["x"] @ w - batch["y"]
    turned = jnp.mean((1 + 2j) * batch["y"].astype(complex))
    return {"loss": jnp.mean(apart**2), "right": jnp.mean(apart > 0), "y": turned, "x": (batch["x"] ** 2).mean(0)}


def by_hand(data):
    apart = data["x"].astype(np.float64) @ W - data["y"]
    x, y = data["x"].astype(np.float64), data["y"].astype(np.float64)
    return {"loss": np.mean(apart**2), "right": np.mean(apart > 0), "y": (1 + 2j) * y.mean(), "x": (x**2).mean(0)}


@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 30), st.sampled_from([1, 4, 7, 64]), st.integers(1, 3))
def test_the_mean_is_exact_for_any_number_of_examples_batches_and_workers(examples, batch, workers):
    data = make_data(examples)
    found = evaluate(means, [W] * workers, data, LocalWorld(workers), batch)
    for name, value in by_hand(data).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-7)
        assert found[name].dtype == (complex if name == "y" else float)


def test_all_programs_are_compiled_beside_each_other_and_once():
    compiled = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(threading.current_thread().name)

    def fn(w, batch):
        return jnp.tanh(batch["x"] @ w).mean()

    world, data, check = LocalWorld(2), make_data(20), MeanCheck()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        first = evaluate(fn, [W] * 2, data, world, 8, check=check)  # 8 and 4 examples on one worker, 8 on the other
        assert len([name for name in compiled if name.startswith("adaptive-start")]) >= 5  # three of them for the check
        compiled.clear()
        assert evaluate(fn, [W] * 2, data, world, 8, check=check) == first
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


def test_no_example_is_taken_twice_and_none_is_left_out():
    class Counting:
        taken: list[int] = []  # noqa: RUF012

        def __len__(self):
            return 11

        def __getitem__(self, index):
            self.taken.append(index)
            return {"n": np.float32(index)}

    data = Counting()
    found = evaluate(lambda s, b: b["n"].mean(), [0.0] * 2, data, LocalWorld(2), 4)
    # The first one is looked at before, and four, with both ends, are compared with parts of them.
    assert len(data.taken) == 1 + 4 + 11
    assert {0, 10} <= set(data.taken[1:5])
    assert sorted(set(data.taken[5:])) == list(range(11))
    assert float(found) == 5.0


@pytest.mark.parametrize("examples", [10, 8])
def test_a_value_that_is_not_a_mean_is_refused_even_if_all_batches_are_alike(examples):
    with pytest.raises(ad.DriverError, match=r"\['losses'\] has shape .*must be a mean over the examples"):
        evaluate(lambda w, b: {"losses": b["y"]}, [W], make_data(examples), LocalWorld(), 4)


@pytest.mark.parametrize("batch", [0, 2.5])
def test_batch_must_be_a_positive_whole_number(batch):
    with pytest.raises(ad.BatchSizeError, match="batch must be positive"):
        evaluate(mean_loss, [W], make_data(10), LocalWorld(), batch)


def test_data_in_place_of_the_function_and_a_reduced_result_are_refused():
    with pytest.raises(ad.DriverError, match="fn must be a function fn"):
        evaluate(make_data(10), [W], mean_loss, LocalWorld(), 4)
    with pytest.raises(ad.DriverError) as error:
        evaluate(lambda w, b: comm.all_reduce(mean_loss(w, b)), [W], make_data(10), LocalWorld(), 4)
    assert "no all_reduce in fn" in error.value.__notes__[-1]


# --- on several processes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [None, (0, 2)])
def test_several_processes_have_the_same_result_of_all_examples(members):
    data, kind = make_data(23), clu.CollectingMetric.from_outputs(("y",))

    def fn(w, batch):
        return {**means(w, batch), "all": kind.from_model_output(y=batch["y"])}

    returned = Job(3).run(lambda world: evaluate(fn, [W], data, world, 5, members=members))
    assert len(returned) == 3
    for found in returned.values():
        np.testing.assert_array_equal(np.sort(found["all"].compute()["y"]), np.sort(data["y"]))
        for name, value in by_hand(data).items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-7)
            np.testing.assert_array_equal(found[name], returned[0][name])
    rows = Job(3).run(lambda world: evaluate(lambda w, b: b["y"], [W], data, world, 5, members=members, op="rows"))
    assert all(np.array_equal(found, data["y"]) for found in rows.values())


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ({"batch": 6}, "batch is not the same on all ranks: rank 0: 5; rank 1: 6"),
        ({"op": "sum", "fn": lambda w, batch: 0 * batch["y"].sum()}, "op is not the same"),
        ({"data": make_data(22)}, "the data set is not the same"),
        ({"fn": lambda w, batch: mean_loss(w, batch).astype(jnp.float16)}, "what fn returns is not the same"),
        ({"fn": lambda w, batch: mean_loss(2 * w, batch)}, "fn is not the same"),
    ],
)
def test_processes_that_evaluate_something_else_are_refused(what, says):
    same = {"fn": mean_loss, "data": make_data(23), "batch": 5}

    def script(world):
        how = {**same, **what} if world.rank else same
        fn, data, batch = (how[name] for name in same)
        with pytest.raises(ad.DisagreementError, match=says):
            evaluate(fn, [W], data, world, batch, op=how.get("op", "mean"))

    assert len(Job(2).run(script)) == 2


# --- what is no mean over examples ------------------------------------------------------------------------------------


def normalized(w, batch):
    x = (batch["x"] - batch["x"].mean(0)[None]) / (batch["x"].std(0)[None] + 1e-3)
    return (x @ w).std() + mean_loss(w, batch)


def test_a_value_that_is_not_a_mean_over_examples_is_refused_by_its_name():
    """It would be another number for each size of batch."""
    data = make_data(20)
    with pytest.raises(ad.DriverError, match=r"\['b'\]\[1\] is no mean (?s:.*)depend on batch="):
        evaluate(lambda w, b: {"a": mean_loss(w, b), "b": (1.0, normalized(w, b))}, [W] * 2, data, LocalWorld(2), 4)
    with pytest.raises(ad.DriverError, match="evaluate: what fn returns is no sum over"):
        evaluate(mean_loss, [W], data, LocalWorld(1), 4, op="sum")


def confusion(w, batch):
    return jnp.zeros((2, 2), jnp.int32).at[(batch["y"] > 0).astype(int), (batch["x"] @ w > 0).astype(int)].add(1)


def test_sums_count_every_example_once():
    data = make_data(23)
    found = evaluate(confusion, [W] * 2, data, LocalWorld(2), 5, op="sum")
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, confusion(W, data))
    with pytest.raises(ad.DriverError, match='op must be "mean", "sum" or "rows"; got \'max\''):
        evaluate(confusion, [W], data, LocalWorld(1), 5, op="max")


@pytest.mark.parametrize(("workers", "batch"), [(1, 64), (3, 5)])
def test_rows_are_those_of_all_examples_in_order(workers, batch):
    data = make_data(23)

    def predict(w, batch):
        return {"class": batch["x"] @ w > 0, "scaled": (batch["x"] * w[None]).astype(jnp.bfloat16), "y": batch["y"]}

    found = evaluate(predict, [W] * workers, data, LocalWorld(workers), batch, op="rows")
    for name, value in predict(W, data).items():
        np.testing.assert_array_equal(found[name], value)
        assert found[name].dtype == value.dtype


ROWS_OF_THE_BATCH = {
    "sum": (lambda w, b: b["y"].sum(), r"has shape \(\) for a batch of 4 .*one row per example"),
    "fixed number": (lambda w, b: jnp.ones(4), r"has shape \(4,\) .*one row per example"),
    "normalized": (lambda w, b: b["y"] - b["y"].mean(), "a row of what fn returns depends on other examples"),
}


@pytest.mark.parametrize(("fn", "says"), ROWS_OF_THE_BATCH.values(), ids=ROWS_OF_THE_BATCH)
def test_rows_that_depend_on_the_batch_are_refused(fn, says):
    with pytest.raises(ad.DriverError, match=says):
        evaluate(fn, [W], make_data(22), LocalWorld(), 4, op="rows")


def test_a_metric_of_nnx_is_summed_where_sums_are_asked_for():
    def fn(w, batch):
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("losses"))
        metrics.update(losses=(batch["x"] @ w - batch["y"]) ** 2)
        return metrics

    data = make_data(23)
    found = evaluate(fn, [W] * 2, data, LocalWorld(2), 5, op="sum").compute()
    assert found["loss"] == pytest.approx(by_hand(data)["loss"], rel=1e-6)
    with pytest.raises(ad.DriverError, match=r'MultiMetric has no merge(?s:.*)op="sum"'):
        evaluate(fn, [W] * 2, data, LocalWorld(2), 5)


@pytest.mark.parametrize("leaf", [0.3, jnp.full(3, 0.3), np.float32(0.3)])
def test_all_workers_evaluate_a_state_of_one_type(leaf):
    """A worker that takes no examples keeps the leaves that it was given, and the others have those of a step."""

    def driver(state, batch):
        moved = state["own"] + batch["y"].mean().astype(jnp.float32).astype(jnp.result_type(state["own"]))
        return {"own": moved, "kept": state["kept"]}, {"mean": comm.all_reduce(batch["y"].mean())}

    seen = []

    def fn(state, batch):
        seen.append(str(jax.make_jaxpr(lambda s: s)(state)))
        return batch["n"].mean()

    data = {"y": np.arange(24, dtype=np.float32)}
    options = {"global_batch": 6, "shares": (1, 0), "world": LocalWorld(2), "per_worker_state": lambda s: s["own"]}
    with ad.Program(driver, {"own": leaf, "kept": leaf}, data, **options) as program:
        for _ in range(3):
            given = [program._parts.state_as_given(leaves) for leaves in program._parts.engine.states]
            types = [[jax.typeof(x).str_short() + str(x.weak_type) for x in jax.tree.leaves(tree)] for tree in given]
            assert types[0] == types[1]
            program.evaluate(fn, {"n": np.arange(4.0)}, batch=1)
            program.step()
    assert len(set(seen)) == 1
