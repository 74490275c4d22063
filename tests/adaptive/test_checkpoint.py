"""A checkpoint is all that a program is: what goes on from it takes the course that it would have taken."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive import operators
from adaptive._decision import Decision
from adaptive._local import LocalWorld
from adaptive.operators import Source, read

from .drivers import Recorder, make_data, mean_loss

W = np.array([0.3, -0.2, 0.1], np.float32)
PLACE = Source("place", lambda r: 1.0 + r.worker)


class Growing(Recorder):
    """A policy with a state: after every third step it asks for as many examples more as it has seen steps."""

    def __init__(self):
        super().__init__(every_step=True)

    def init(self, n_workers):
        return {"steps": 0, "losses": np.zeros(n_workers), "on device": jnp.zeros(())}

    def __call__(self, observation, state):
        self.seen.append(observation)
        new = {
            "steps": state["steps"] + 1,
            "losses": state["losses"] + observation.values[0],
            "on device": state["on device"] + 1,
        }
        decision = Decision(global_batch=observation.global_batch + new["steps"]) if observation.due else None
        return decision, new


def driver_of(handler):
    def driver(state, batch):
        loss, grads = jax.value_and_grad(mean_loss)(state["w"], batch)
        loss = mon.ema(comm.all_reduce(loss))
        operators.hook("grow", handler, (loss,), every=3)
        key, _ = jax.random.split(state["key"])
        w = state["w"] - 0.1 * comm.all_reduce(grads)
        return {"key": key, "n": state["n"] + 1, "w": w}, {"loss": loss}

    return driver


def state():
    return {"key": jax.random.key(3), "n": 0, "w": W}


def build(driver, state, workers=2, **options):
    options = {"global_batch": 5, "world": LocalWorld(workers), "deterministic": True, **options}
    return ad.Program(driver, state, make_data(24), **options)


def plain(tree):
    return jax.tree.map(
        lambda a: np.asarray(jax.random.key_data(a) if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) else a), tree
    )


def course(program, steps):
    program.warm_up()
    reports = list(program.run(steps=steps))
    return [(r.step, r.epoch, r.examples, r.batch_sizes, float(r.metrics["loss"])) for r in reports]


def test_what_goes_on_from_a_checkpoint_takes_the_same_course_to_the_last_bit():
    with build(driver_of(Growing()), state()) as program:
        course(program, 5)
        kept = pickle.loads(pickle.dumps(program.checkpoint()))
        course_of_one = course(program, 6)
        end_of_one = plain(program.state)
    with build(driver_of(Growing()), state(), global_batch=7, shares=(5, 2)) as other:
        course(other, 2)
        other.restore(kept)
        assert other.steps == 5
        assert course(other, 6) == course_of_one
        assert jax.tree.all(jax.tree.map(np.array_equal, plain(other.state), end_of_one))


def test_a_checkpoint_is_plain_and_is_left_alone():
    with build(driver_of(Growing()), state()) as program:
        course(program, 2)
        kept = program.checkpoint()
        leaves = jax.tree.leaves(kept)
        assert all(isinstance(leaf, np.ndarray | np.generic | int | float) for leaf in leaves)
        copy = pickle.loads(pickle.dumps(kept))
        program.restore(kept)
        program.step()
        assert jax.tree.all(jax.tree.map(np.array_equal, kept, copy))
        for leaf in leaves:
            if isinstance(leaf, np.ndarray) and leaf.ndim:
                leaf[...] = 0
        program.restore(copy)
        assert np.array_equal(plain(program.state)["w"], copy["state"]["w"])


def test_taking_a_checkpoint_changes_nothing():
    courses = []
    for taken in (False, True):
        with build(driver_of(Growing()), state()) as program:
            first = course(program, 4)
            if taken:
                program.checkpoint()
            courses.append(first + course(program, 4))
    assert courses[0] == courses[1]


def test_a_policy_is_not_shown_steps_of_before_the_checkpoint_twice():
    handler = Growing()
    with build(driver_of(handler), state()) as program:
        course(program, 4)
        kept = program.checkpoint()
        course(program, 1)
        program.restore(kept)
        handler.seen.clear()
        course(program, 2)
    assert [o.step for o in handler.seen] == [5, 6]


def test_shares_hold_on_behind_a_checkpoint():
    sizes = []
    for restored in (False, True):
        with build(driver_of(Recorder()), state(), workers=3, global_batch=10) as program:
            program.warm_up()
            program.step()
            if restored:
                program.restore(program.checkpoint())
            program.rescale(global_batch=21)
            sizes.append(program.batch_sizes)
    assert sizes[0] == sizes[1] == (7, 7, 7)


def test_another_number_of_workers_may_go_on():
    with build(driver_of(Recorder()), state()) as program:
        course(program, 3)
        kept = program.checkpoint()
        reference, end = course(program, 2), plain(program.state)
    with build(driver_of(Recorder()), state(), workers=3) as other:
        other.restore(kept)
        assert other.global_batch == 5
        assert max(other.batch_sizes) - min(other.batch_sizes) <= 1
        found = course(other, 2)
    np.testing.assert_allclose([r[4] for r in found], [r[4] for r in reference], rtol=1e-5)
    np.testing.assert_allclose(plain(other.state)["w"], end["w"], rtol=1e-5)


def local(state, batch):
    smooth = mon.ema(read(PLACE))
    own = state["own"] + read(PLACE)
    return {"own": own, "all": comm.all_reduce(own, op="sum")}, {
        "smooth": comm.all_gather(smooth),
        "y": comm.all_reduce(batch["y"].mean()),
    }


def test_what_is_local_is_kept_for_each_worker():
    options = {"local": lambda s: s["own"]}
    start = {"own": 0.0, "all": 0.0}
    with build(local, start, workers=3, **options) as program:
        program.step()
        program.step()
        kept = program.checkpoint()
    assert kept["state"]["own"].tolist() == [2, 4, 6]
    with build(local, start, workers=3, **options) as other:
        other.restore(kept)
        report = other.step()
        assert [float(leaves[-1]) for leaves in other._engine.states] == [3, 6, 9]
        np.testing.assert_allclose(report.metrics["smooth"], [1, 2, 3], rtol=1e-6)
    with (
        build(local, start, workers=2, **options) as fewer,
        pytest.raises(ad.DataError, match="local state of 3 workers; here are 2"),
    ):
        fewer.restore(kept)


def counting(label, shape=()):
    def driver(state, batch):
        operators.slot(label, np.zeros(shape), lambda n: (n + 1, None))
        return jax.tree.map(lambda s: s + comm.all_reduce(batch["y"].mean()), state), {}

    return driver


@pytest.mark.parametrize(
    ("driver", "start", "wrong"),
    [
        (counting("other"), [0.0, 0.0], r"slots \['count/0', 'other/0'\] are not in both"),
        (counting("count"), [0.0], "has 2 leaves, this program's 1"),
        (counting("count"), [0.0, np.zeros(2, np.float32)], r"shape \(\) for one of shape \(2,\)"),
        (counting("count", (2,)), [0.0, 0.0], r"shape \(\) for one of shape \(2,\)"),
    ],
    ids=["slots", "leaves", "shapes", "shapes of slots"],
)
def test_a_checkpoint_of_another_driver_is_refused_and_changes_nothing(driver, start, wrong):
    with build(counting("count"), [5.0, 6.0]) as program:
        program.step()
        kept = program.checkpoint()
    with build(driver, start) as other:
        with pytest.raises(ad.DriverError, match=wrong):
            other.restore(kept)
        assert jax.tree.all(jax.tree.map(lambda a, b: jnp.array_equal(a, jnp.asarray(b)), other.state, start))
        assert (other.steps, other._stream.consumed) == (0, 0)
