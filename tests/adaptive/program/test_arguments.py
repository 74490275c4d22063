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
from adaptive.runtime.local_world import LocalWorld
from tests.problems import build
from tests.relaxed import relaxed_tx

X = {"x": np.arange(24.0, dtype=np.float32)}


def total(state, batch):
    """A driver with nothing wrong."""
    mean = comm.all_reduce(batch["x"].mean())
    return jax.tree.map(lambda leaf: leaf + mean, state), {"mean": mean}


def three(state, batch, model):
    return total(state, batch)


def unsplittable(state, batch):
    return total(state, batch)[0], {"rows": comm.all_gather(batch["x"].std())}


class Trainer:
    def step(self, state, batch):
        return total(state, batch)


class Source:
    """A grain-like source with one odd row."""

    def __init__(self, rows: int, **odd):
        self.rows, self.odd = rows, odd

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return self.odd.get(f"row{index}", {"x": np.float32(index)})


def over_devices(array, *axes):
    """Over two devices: `axes` of it sharded, or the whole array on both."""
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:2]), ("model",))
    return jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)))


def line_search():
    """A state and a driver whose optimizer calls the loss, a mean over all workers, in a loop."""
    tx = relaxed_tx(optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(8)))

    def driver(state, batch):
        def value_fn(s):
            return comm.all_reduce(jnp.square(batch["x"] - s).mean())

        loss, grads = comm.all_reduce(jax.value_and_grad(lambda s: jnp.square(batch["x"] - s).mean())(state[0]))
        updates, opt = tx.update(grads, state[1], state[0], value=loss, grad=grads, value_fn=value_fn)
        return (state[0] + updates, opt), {}

    return {"driver": driver, "state": (jnp.zeros(()), tx.init(jnp.zeros(())))}


def sharded():
    return {"b": 0.0, "w": over_devices(jnp.zeros((4, 3)), "model")}


W = {"state": {"w": 0.0}}
REFUSED = [
    # the world
    ({"world": comm.world}, "world= is world, which makes a world when it is called. Write  world=comm.world()"),
    ({"world": "mpi"}, "such as  comm.world()  or  comm.SoloWorld(); got 'mpi'"),
    # the driver
    ({"driver": three}, "called as three(state, batch), but its signature is three(state, batch, model)"),
    ({"driver": Trainer.step}, "missing a required argument: 'batch'"),
    ({"driver": Trainer}, "the class Trainer; pass a method of an instance"),
    ({"driver": "step"}, "driver(state, batch) -> (state, metrics); got 'step'"),
    ({"driver": lambda s, b: (s, {"run": "a"})}, "the metric ['run'] as a str, which is not an array of numbers"),
    ({"driver": lambda s, b: ({"w": "a"}, {}), **W}, "the state['w'] as a str"),
    (line_search, "(test_arguments.py:"),
    (line_search, "'Line searches'"),
    # the state
    ({"state": {"name": "adam"}}, "the state holds 'adam', which is not an array of numbers"),
    ({"state": lambda key: 0.0}, "a function with arguments (missing a required argument: 'key')"),
    (lambda: {"state": sharded()}, "state['w'] is sharded over 2 devices (NamedSharding, "),
    (lambda: {"state": sharded(), "per_worker_state": lambda s: s["w"]}, "np.asarray(x)"),
    ({"per_worker_state": "opt", **W}, "with TypeError: 'str' object is not callable. It must return parts of the"),
    ({"per_worker_state": lambda state: state["opt"], **W}, "fails on the state, PyTreeDef({'w': *}), with KeyError"),
    ({"per_worker_state": lambda state: 7, **W}, "parts of the state unchanged"),
    # data
    ({"data": {"x": np.zeros(24), "y": np.zeros(23)}}, "different numbers of examples"),
    ({"data": {"x": np.zeros((0, 3))}}, "the data set is empty: data['x'] has shape (0, 3)"),
    ({"data": {"x": np.array([[1], [1, 2]], dtype=object)}}, "data['x'] holds Python objects"),
    ({"data": {"x": ["a", "b"]}}, "data['x']"),
    ({"data": Source(0)}, "the data set is empty: len(data) is 0"),
    # numbers
    ({"global_batch": math.inf}, "global_batch must be a whole number of examples; got inf"),
    ({"global_batch": None}, "global_batch must be a whole number of examples; got None"),
    ({"global_batch": 25}, "global_batch=25 is larger than the data set, which has 24 examples"),
    ({"global_batch": 7, "max_local_batch": 2}, "global_batch=7 is more than the maximum of the 3 workers, 6"),
    ({"microbatch": 0}, "microbatch must be positive, a whole number of examples; got 0"),
    ({"max_local_batch": 0}, "max_local_batch must be positive, a whole number of examples; got 0"),
    ({"max_local_batch": [12] * 9}, "max_local_batch is one whole number of examples, or one for each of"),
    (
        {"max_local_batch": "auto", "driver": unsplittable},
        "Write the most examples that a worker can hold",
    ),
    (
        {"microbatch": 2, "driver": unsplittable},
        "microbatch=2: this driver's batches cannot be split into micro",
    ),
    ({"shares": ["1"] * 9}, "shares are numbers, one per worker"),
    ({"shares": [-1.0, 2.0, 2.0]}, "negative"),
    ({"shares": [math.nan, 2.0, 2.0]}, "nan"),
    ({"seed": "3"}, "seed must be a whole number; got '3'"),
    ({"nonfinite": "ignore"}, "nonfinite must be"),
]


@pytest.mark.parametrize(("what", "says"), REFUSED, ids=[says[:40] for _, says in REFUSED])
def test_what_no_program_can_be_built_from(what, says):
    given = {"driver": total, "state": 0.0, "data": X, "global_batch": 12, "world": LocalWorld(3)}
    with pytest.raises(ad.AdaptiveError) as caught:
        build(**given | (what() if callable(what) else what))
    assert says in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.fixture(scope="module")
def standing():
    """A program that continues after any error."""
    with build(total, 0.0, X, 12, resizable=True, world=LocalWorld(3)) as program:
        yield program


@pytest.mark.parametrize("asked", [{"global_batch": math.inf}, {"global_batch": 25}, {"shares": [-1.0, 2.0, 2.0]}])
def test_a_request_that_cannot_be_changes_nothing(standing, asked):
    with pytest.raises(ad.BatchSizeError, match=next(iter(asked))):
        standing.rescale(**asked)
    assert standing.step().batch_sizes == standing.batch_sizes == (4, 4, 4)


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
def test_a_run_with_other_arguments(standing, options, says):
    before = standing.steps
    with pytest.raises(ad.DriverError) as caught:
        list(standing.run(**options))
    assert says in str(caught.value)
    assert standing.steps == before


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"x": np.zeros(2, np.float32)}, r"example\['x'\] of example 5 is float32\[2\], of example 0 float32\[\]"),
        ({"y": np.float32(0)}, "example 5 has the structure"),
    ],
)
def test_a_source_with_an_odd_row(row, says):
    with (
        build(total, 0.0, Source(2000, row5=row), 2000) as program,  # not one of those that are compared at first
        pytest.raises(ad.DataError, match=says),
    ):
        program.step()


# --- what is none -----------------------------------------------------------------------------------------------------


def test_fully_replicated_arrays_are_accepted_and_sharded_checkpoints_refused():
    table, state = over_devices(jnp.arange(4.0)), {"w": over_devices(jnp.zeros(4))}

    def driver(state, batch):
        mean = comm.all_reduce(batch["x"].mean())
        return {"w": state["w"] + mean * table}, {"mean": mean}

    with build(driver, state, {"x": over_devices(jnp.asarray(X["x"]))}, 12) as program:
        expected = float(program.step().metrics["mean"]) * np.arange(4)
        checkpoint = program.checkpoint()
        w = jnp.asarray(checkpoint["state"]["w"])
        checkpoint["state"]["w"] = over_devices(w, "model")
        with pytest.raises(ad.CheckpointError, match=r"state\['w'\] is sharded over 2 devices"):
            program.restore(checkpoint)
        checkpoint["state"]["w"] = over_devices(w)
        program.restore(checkpoint)
        np.testing.assert_allclose(program.state["w"], expected, rtol=1e-6)
    np.testing.assert_array_equal(state["w"], 0)  # the user's own memory
