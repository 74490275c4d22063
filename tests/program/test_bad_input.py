"""Users' mistakes: each ends in an error that names it, on every worker."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from tests.relaxed import relaxed_tx

from .problems import build

X = {"x": np.arange(24.0, dtype=np.float32)}


def total(state, batch):
    """A driver with nothing wrong."""
    mean = comm.all_reduce(batch["x"].mean())
    return state + mean, {"mean": mean}


def refused(kind, *texts, driver=total, state=0.0, data=X, global_batch=12, **options):
    """Building the program fails, with all of these texts in the message."""
    with pytest.raises(kind) as caught:
        build(driver, state, data, global_batch, **options)
    for text in texts:
        assert text in str(caught.value)
    assert isinstance(caught.value, ad.AdaptiveError)
    assert isinstance(caught.value, ValueError)


# --- arrays over several devices --------------------------------------------------------------------------------------


def over_devices(array, *axes):
    """Over two devices: `axes` of it sharded, or the whole array on both."""
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:2]), ("model",))
    return jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)))


def first_weight(state, batch):
    mean = comm.all_reduce(batch["x"].mean())
    return jax.tree.map(lambda w: w + mean, state), {"mean": mean}


def test_a_state_that_is_sharded(world):
    texts = ["['w'] is sharded over 2 devices (NamedSharding, ", "np.asarray(x)"]
    state = {"b": 0.0, "w": over_devices(jnp.zeros((4, 3)), "model")}
    refused(ad.DriverError, "state" + texts[0], texts[1], driver=first_weight, state=state)
    refused(ad.DriverError, "state" + texts[0], driver=first_weight, state=state, per_worker_state=lambda s: s["w"])


def test_a_checkpoint_that_is_sharded(world):
    with build(first_weight, {"w": np.zeros(4, np.float32)}, X, 12) as program:
        checkpoint = program.checkpoint()
        checkpoint["state"]["w"] = over_devices(jnp.ones(4), "model")
        with pytest.raises(ad.CheckpointError, match=r"state\['w'\] is sharded over 2 devices"):
            program.restore(checkpoint)
        np.testing.assert_array_equal(program.state["w"], 0)


def test_fully_replicated_arrays_are_accepted(world):
    table, state = over_devices(jnp.arange(4.0)), {"w": over_devices(jnp.zeros(4))}

    def driver(state, batch):
        mean = comm.all_reduce(batch["x"].mean())
        return {"w": state["w"] + mean * table}, {"mean": mean}

    data = {"x": over_devices(jnp.asarray(X["x"]))}
    with build(driver, state, data, 12) as program:
        mean = program.step().metrics["mean"]
        checkpoint = program.checkpoint()
        checkpoint["state"]["w"] = over_devices(jnp.asarray(checkpoint["state"]["w"]))
        program.restore(checkpoint)
        np.testing.assert_allclose(program.state["w"], float(mean) * np.arange(4), rtol=1e-6)
    np.testing.assert_array_equal(state["w"], 0)  # the user's own memory


# --- drivers ----------------------------------------------------------------------------------------------------------


def test_a_state_that_holds_no_array(world):
    refused(ad.DriverError, "the state holds 'adam', which is not an array of numbers", state={"name": "adam"})


def test_integers_sum_and_empty_trees_are_no_leaves(world):
    def driver(state, batch):
        counted = comm.all_reduce({"n": jnp.int32(2) + 0 * ad.worker_index(), "none": None, "nothing": ()}, op="sum")
        return total(state, batch)[0], counted

    with build(driver, 0.0, X, 12, world=world, microbatch=1) as program:
        metrics = program.step().metrics
    assert metrics == {"n": 2 * world.size, "none": None, "nothing": ()}
    assert metrics["n"].dtype == jnp.int32


def test_a_line_search_that_calls_the_loss_in_a_loop(world):
    tx = relaxed_tx(optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(8)))

    def driver(state, batch):
        def value_fn(s):
            return comm.all_reduce(jnp.square(batch["x"] - s).mean())

        loss, grads = comm.all_reduce(jax.value_and_grad(lambda s: jnp.square(batch["x"] - s).mean())(state[0]))
        updates, opt = tx.update(grads, state[1], state[0], value=loss, grad=grads, value_fn=value_fn)
        return (state[0] + updates, opt), {}

    start = jnp.zeros(())
    refused(ad.CollectiveError, "(test_bad_input.py:", "'Line searches'", driver=driver, state=(start, tx.init(start)))


# --- data -------------------------------------------------------------------------------------------------------------


class Source:
    """A grain-like source with one odd row."""

    def __init__(self, rows: int, **odd):
        self.rows, self.odd = rows, odd

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return self.odd.get(f"row{index}", {"x": np.float32(index)})


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"x": np.zeros(24), "y": np.zeros(23)}, "different numbers of examples"),
        ({"x": np.zeros((0, 3))}, "the data set is empty: data['x'] has shape (0, 3)"),
        ({"x": np.array([[1], [1, 2]], dtype=object)}, "data['x'] holds Python objects"),
        ({"x": ["a", "b"]}, "data['x']"),
        (Source(0), "the data set is empty: len(data) is 0"),
    ],
)
def test_data_that_cannot_be_used(world, data, says):
    refused(ad.DataError, says, data=data, global_batch=1)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"x": np.zeros(2, np.float32)}, "example['x'] of example 5 is float32[2], of example 0 float32[]"),
        ({"y": np.float32(0)}, "example 5 has the structure"),
    ],
)
def test_a_source_with_an_odd_row(world, row, says):
    with (
        build(total, 0.0, Source(2000, row5=row), 2000) as program,  # not one of those that are compared at first
        pytest.raises((ad.DataError, ad.WorkerError)) as caught,
    ):
        program.step()
    errors = [e.decode() for e in world.all_gather_bytes(f"{type(caught.value).__name__}: {caught.value}".encode())]
    assert any(says in e for e in errors)
    assert [e[:9] for e in errors].count("DataError") == 1  # on the process that found it; the others get a WorkerError
    assert all("failed in step 1" in e for e in errors if not e.startswith("DataError"))


@pytest.fixture(scope="module")
def standing(world):
    """A program that continues after any error."""
    with build(total, 0.0, X, 12, resizable=True) as program:
        yield program


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("global_batch", "says"),
    [
        (math.inf, "global_batch must be a whole number of examples; got inf"),
        (None, "global_batch must be a whole number of examples; got None"),
        (25, "global_batch=25 is larger than the data set, which has 24 examples"),
    ],
)
def test_a_global_batch_that_cannot_be(standing, global_batch, says):
    refused(ad.BatchSizeError, says, global_batch=global_batch)
    if global_batch is not None:  # which leaves it as it is
        with pytest.raises(ad.BatchSizeError) as caught:
            standing.rescale(global_batch=global_batch)
        assert says in str(caught.value)
    standing.step()
    assert standing.global_batch == 12


def test_more_examples_than_the_workers_may_take(world):
    n = world.size
    refused(
        ad.BatchSizeError,
        f"global_batch={2 * n + 1} is more than the maximum of the {n} workers, {2 * n}",
        global_batch=2 * n + 1,
        max_local_batch=2,
    )


@pytest.mark.parametrize(("first", "says"), [(-1.0, "negative"), (math.nan, "nan")])
def test_shares_that_are_none(world, standing, first, says):
    shares = [first] + [2.0] * (world.size - 1)
    refused(ad.BatchSizeError, "shares", says, shares=shares)
    with pytest.raises(ad.BatchSizeError, match="shares"):
        standing.rescale(shares=shares)
    assert standing.batch_sizes == standing.step().batch_sizes

    def adapt(control):
        control.rescale(shares=shares)

    def driver(state, batch):
        ctrl.hook(adapt, every=2)
        return total(state, batch)

    with build(driver, 0.0, X, 12) as program:
        program.step()
        with pytest.raises(ad.BatchSizeError) as caught:
            program.step()
    assert "hook 'adapt' (test_bad_input.py:" in str(caught.value)
    assert "step 2: rescale(shares=" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"microbatch": 0}, "microbatch must be positive, a whole number of examples; got 0"),
        ({"max_local_batch": 0}, "max_local_batch must be positive, a whole number of examples; got 0"),
        ({"max_local_batch": [12] * 9}, "max_local_batch is one whole number of examples, or one for each of"),
        ({"shares": ["1"] * 9}, "shares are numbers, one per worker"),
        ({"seed": "3"}, "seed must be a whole number; got '3'"),
        ({"nonfinite": "ignore"}, "nonfinite must be"),
    ],
)
def test_options_out_of_range(world, options, says):
    refused(ad.AdaptiveError, says, **options)


# --- arguments of other types -----------------------------------------------------------------------------------------


def step_of_three(state, batch, model):
    return total(state, batch)


class Trainer:
    def step(self, state, batch):
        return total(state, batch)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (comm.world, "world= is world, which makes a world when it is called. Write  world=comm.world()"),
        ("mpi", "such as  comm.world()  or  comm.SoloWorld(); got 'mpi'"),
    ],
)
def test_a_world_that_is_none(given, says):
    with pytest.raises(ad.DriverError) as caught:
        ad.Program(total, 0.0, X, global_batch=12, world=given)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("driver", "says"),
    [
        (
            step_of_three,
            "called as step_of_three(state, batch), but its signature is step_of_three(state, batch, model)",
        ),
        (Trainer.step, "missing a required argument: 'batch'"),
        (Trainer, "the class Trainer; pass a method of an instance"),
        ("step", "driver(state, batch) -> (state, metrics); got 'step'"),
    ],
)
def test_a_driver_that_cannot_be_called(world, driver, says):
    refused(ad.DriverError, says, driver=driver)


@pytest.mark.parametrize(
    ("picked", "says"),
    [
        ("opt", "with TypeError: 'str' object is not callable. It must return parts of the state, such as  lambda"),
        (lambda state: state["opt"], "fails on the state, PyTreeDef({'w': *}), with KeyError: 'opt'"),
        (lambda state: 7, "parts of the state unchanged"),
    ],
)
def test_a_part_of_the_state_that_is_none(world, picked, says):
    refused(ad.DriverError, says, driver=first_weight, state={"w": 0.0}, per_worker_state=picked)


@pytest.mark.parametrize(
    ("state", "metrics", "says"),
    [
        (None, {"run": "a"}, "driver 'driver' returns the metric ['run'] as a str, which is not an array of numbers"),
        ({"w": "a"}, {}, "the state['w'] as a str"),
    ],
)
def test_a_result_that_is_no_array(world, state, metrics, says):
    def driver(old, batch):
        return state or first_weight(old, batch)[0], metrics

    refused(ad.DriverError, says, driver=driver, state={"w": 0.0})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": -1}, "steps must be 0 or more; got -1"),
        ({"until_epoch": "3"}, "until_epoch must be a whole number; got '3'"),
        ({"steps": 3, "until_step": 9}, "takes steps= or until_step=, not both"),
        ({"steps": 1, "record": 3}, 'record= is the path of a file, such as "run.jsonl"; got 3'),
        ({"steps": 1, "progress": "yes"}, "progress must be True or False; got 'yes'"),
    ],
)
def test_a_run_with_other_arguments(world, options, says):
    with build(total, 0.0, X, 12) as program:
        with pytest.raises(ad.DriverError) as caught:
            list(program.run(**options))
        assert says in str(caught.value)
        assert program.steps == 0
