"""The asynchronous mean of pairs: results, worlds, and errors. Processes: test_pairs.py."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.base.mailbox import Mailbox
from adaptive.operators.peer_read import peers
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import make_data

SIZE, ROUNDS, RATE = 4, 8, 0.05


def gradient(w, minibatch):
    return 2 * minibatch["x"].T @ (minibatch["x"] @ w - minibatch["y"]) / len(minibatch["y"])


def pairs(peer="random"):
    def local_step(w, minibatch):
        return comm.asynchronous_mean(w, peer=peer) - RATE * gradient(w, minibatch), None

    def driver(w, batch):
        w, _ = jax.lax.scan(local_step, w, ad.minibatches(batch, size=SIZE))
        return comm.all_reduce(w), {}

    return driver


def double(examples: int) -> dict[str, np.ndarray]:
    return {name: rows.astype(np.float64) for name, rows in make_data(examples).items()}


def program_of(driver, world=None, global_batch=36, shares=(1, 3, 5), **options) -> ad.Program:
    world = world or LocalWorld(3)
    data = options.pop("data", make_data(180))
    state = options.pop("state", jnp.zeros(3))
    return ad.Program(driver, state, data, global_batch=global_batch, shares=shares, world=world, **options)


# --- what is computed -------------------------------------------------------------------------------------------------


def plain(w, of_workers, peer, seed, round):
    """A round in numpy; workers one after another, as in a LocalWorld."""
    published: dict[int, np.ndarray] = {}
    replicas = []
    for worker, batch in enumerate(of_workers):
        x = w
        for update in range(len(batch["y"]) // SIZE):
            minibatch = {name: rows[update * SIZE : (update + 1) * SIZE] for name, rows in batch.items()}
            published[worker] = x
            whom = [p for p in peers(peer, seed, round, update, worker, (0, 1, 2)) if p in published]
            other = published[whom[0]] if whom else x
            x = (x + other) / 2 - RATE * gradient(x, minibatch)
        replicas.append(x)
    return np.average(replicas, axis=0, weights=[len(batch["y"]) for batch in of_workers])


@pytest.mark.parametrize("peer", ["random", "ring"])
def test_it_is_the_published_update(peer):
    """72 updates of three workers, whose batches are uneven and change."""
    with jax.enable_x64(True):
        w = np.zeros(3)
        with program_of(pairs(peer), data=double(180), seed=5, deterministic=True) as program:
            for round in range(ROUNDS):
                if round == 4 and peer == "random":
                    program.rescale(shares=(5, 1, 3))
                whole, cuts = program._parts.stream.peek(program.batch_sizes), np.cumsum([0, *program.batch_sizes])
                of_workers = [{k: np.asarray(v[a:b]) for k, v in whole.items()} for a, b in pairwise(cuts)]
                program.step()
                w = plain(w, of_workers, peer, 5, round)
                np.testing.assert_allclose(program.state, w, rtol=0, atol=1e-10)
            assert program.batch_sizes == ((20, 4, 12) if peer == "random" else (4, 12, 20))


def test_a_tree_of_several_dtypes_round_trips():
    def driver(state, batch):
        mean = comm.asynchronous_mean({"a": state["a"] + ad.worker_index().astype(jnp.float32), **state["rest"]})
        return state, {name: comm.all_gather(leaf) for name, leaf in mean.items()}

    rest = {"b": jnp.ones((2, 2), jnp.bfloat16), "c": jnp.full(3, 1 + 2j), "none": jnp.zeros((0, 2)), "d": jnp.ones(())}
    rest |= {"e": jnp.arange(3.0), "f": jnp.arange(7.0)}  # several of one dtype, in a common vector
    with program_of(driver, shares=None, state={"a": jnp.zeros((2, 3)), "rest": rest}) as program:
        metrics = program.step().metrics
    for name, leaf in rest.items():
        assert metrics[name].dtype == leaf.dtype
        np.testing.assert_array_equal(metrics[name], np.broadcast_to(leaf, (3, *leaf.shape)))
    means = np.asarray(metrics["a"])[:, 0, 0]
    assert means[0] == 0  # nobody had published
    assert means[1] == 0.5
    assert means[2] in (1.0, 1.5)


def test_derivatives_treat_published_values_as_constants():
    def driver(w, batch):
        slope = jax.grad(lambda w: (comm.asynchronous_mean(w) ** 2).sum())(w)
        return w, {"slope": comm.all_gather(slope)}

    with program_of(driver, shares=None, state=jnp.full(1, 3.0)) as program:
        np.testing.assert_allclose(program.step().metrics["slope"], np.full((3, 1), 3.0))


def test_rounds_restart():
    """Values of another round, or of before a restore, are missing."""
    mailbox = Mailbox()
    mailbox.publish(0, 7, [np.ones(2)])
    assert mailbox.look(0, 1, 7) is not None
    assert mailbox.look(0, 1, 8) is None
    assert mailbox.look(2, 1, 7) is None
    with program_of(pairs(), deterministic=True) as program:
        program.step()
        kept, ends = program.checkpoint(), []
        for _ in range(2):
            program.restore(kept)
            for _ in range(3):
                program.step()
            ends.append(program.state)
    np.testing.assert_array_equal(*ends)


# --- who is looked at -------------------------------------------------------------------------------------------------


def test_neighbors_take_turns():
    assert [peers("ring", 0, 0, update, 7, (0, 2, 3, 7)) for update in range(3)] == [[0, 3], [3, 0], [0, 3]]
    assert peers("ring", 0, 0, 0, 1, (0, 1)) == [0]
    assert peers("ring", 0, 0, 4, 1, (1,)) == peers("random", 0, 0, 4, 1, (1,)) == []


# --- what the plan says -----------------------------------------------------------------------------------------------


def test_a_driver_that_publishes_runs_whole_batches():
    def driver(w, batch):
        return comm.all_reduce(comm.asynchronous_mean(w) - RATE * gradient(w, batch)), {}

    with program_of(driver) as program:
        assert not program._parts.plan.splittable
        assert "asynchronous_mean (test_asynchronous_mean.py:" in program.explain()
        assert "publishes once per worker" in program.explain()
    with program_of(driver) as program:
        assert "depends on which values are published when" in str(program.check())


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(driver, *texts, world=None, **options):
    with pytest.raises(ad.DriverError) as caught:
        program_of(driver, world, **options)
    for text in ("asynchronous_mean (test_asynchronous_mean.py:", *texts):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (jnp.ones(2, jnp.int32), "['n'] is int32, which cannot be averaged"),
        (jnp.ones(2, bool), "['n'] is bool, which"),
        (jax.random.key(0), "['n'] is a PRNG key"),
        ("text", "['n'] is 'text': neither an array nor a number"),
    ],
)
def test_trees_without_a_mean_are_refused(leaf, text):
    def driver(w, batch):
        comm.asynchronous_mean({"w": w, "n": leaf})
        return comm.all_reduce(w), {}

    refused(driver, text)


def test_where_it_cannot_stand():
    with pytest.raises(ad.CollectiveError, match=r"outside a program .* only a program has rounds"):
        comm.asynchronous_mean(jnp.ones(2))

    def mapped(w, batch):
        return comm.all_reduce(jax.vmap(comm.asynchronous_mean)(w)), {}

    refused(mapped, "mapped by jax.vmap")
    average = jax.jit(lambda w: comm.asynchronous_mean(w))

    def twice(w, batch):
        return comm.all_reduce(average(w) + average(2 * w)), {}

    refused(twice, "in a jax.jit that the driver calls more than once")

    def no_round(w, batch):
        return comm.asynchronous_mean(w), {}

    refused(no_round, "a round must end with a collective", per_worker_state=lambda w: w)

    def no_such(w, batch):
        return comm.all_reduce(comm.asynchronous_mean(w, peer="any")), {}

    with pytest.raises(ad.CollectiveError, match="peer= must be 'random' or 'ring'; got 'any'"):
        program_of(no_such)


def test_worlds_without_a_board():
    world = LocalWorld(3)
    world.why_no_mailbox = lambda: "it has none today"  # type: ignore[method-assign]
    refused(pairs(), "has no mailboxes: it has none today.", world=world)
