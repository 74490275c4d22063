"""Streamed rounds, against a plain loop of their update and `diloco`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import collectives.strategies as sync
from adaptive import CollectiveError
from adaptive.runtime.local_world import LocalWorld
from collectives._codes import codec_of

from .test_islands import EXACT_OUTER, FIRST, INNER, OUTER, RATE, built, close, data, gradient, run, states

pytestmark = pytest.mark.usefixtures("double_precision")

ROUND, PARTS = 4, 2


def vector(params):
    """In the order of the tree's leaves."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


class Loop:
    """The published update in numpy, with momentum as inner and Nesterov's as outer optimizer.

    With a codec changes are sent in codes, and each worker keeps the rounding error of each fragment.
    """

    def __init__(self, overlap, mixing, workers, codec=None):
        self.overlap, self.mixing, self.codec = overlap, mixing, codec
        self.left = np.zeros((workers, PARTS, 3))
        self.z, self.outer, self.taken = FIRST, np.zeros(5), 0
        self.own = [(FIRST, np.zeros(5))] * workers  # replica and momentum; a replica is None where it is to begin anew

    def step(self, batches):
        place = [slice(0, 3), slice(3, 5)][self.taken % PARTS]
        there = [i for i, batch in enumerate(batches) if batch is not None]
        before, after = {}, {}
        for i in there:
            x, momentum = self.own[i]
            known = x is not None
            x = before[i] = x if known else self.z
            for part in range(ROUND // PARTS):
                n = len(batches[i]["y"]) // (ROUND // PARTS)
                momentum = 0.5 * momentum + gradient(
                    x, jax.tree.map(lambda a, p=part, n=n: a[p * n : (p + 1) * n], batches[i])
                )
                x = x - RATE * momentum
            after[i] = x, momentum, known
        counted = [i for i in there if after[i][2] or not self.overlap]
        those = before if self.overlap else {i: x for i, (x, _, _) in after.items()}
        change = np.zeros(5)
        if counted:
            sizes = [len(batches[i]["y"]) for i in counted]
            change = self.z - sum(b * those[i] for b, i in zip(sizes, counted, strict=True)) / sum(sizes)
            if self.codec is not None:
                change[place] = self.coded({i: (self.z - those[i])[place] for i in counted}, sizes)
        z = self.z.copy()
        self.outer[place] = change[place] + 0.9 * self.outer[place]
        z[place] -= 0.7 * (change + 0.9 * self.outer)[place]
        for i in range(len(batches)):
            self.own[i] = None, self.own[i][1]
        for i, (x, momentum, _) in after.items():
            x = x.copy()
            if self.taken or not self.overlap:
                x[place] = self.mixing * x[place] + (1 - self.mixing) * z[place]
            self.own[i] = x, momentum
        self.z, self.taken = z, self.taken + 1

    def coded(self, changes, sizes):
        """Return the mean of the workers' codes, without the last fragment's padding."""
        number, rows = self.taken % PARTS, []
        for (worker, change), size in zip(changes.items(), sizes, strict=True):
            wanted = np.pad(change, (0, 3 - len(change))) + self.left[worker, number]
            coded = self.codec.encode(self.codec.blocks(jnp.asarray(wanted)))
            self.left[worker, number] = wanted - np.asarray(self.codec.decode(coded, jnp.float64)).reshape(-1)[:3]
            rows.append(self.codec.of_rows(self.codec.to_rows(coded, np.float32(size))))
        total = sum(np.asarray(self.codec.decode(row, jnp.float64)) for row in rows)
        return total.reshape(-1)[: len(change)] / sum(sizes)


def check(program, strategy, loop, batches):
    loop.step(batches)
    for batch, (x, _), state in zip(batches, loop.own, states(program), strict=True):
        if batch is not None:
            close(vector(strategy.model(state)), loop.z)
            close(vector(state.replica), x)


@pytest.mark.parametrize(("overlap", "mixing"), [(True, 0.5), (True, 0.0), (False, 0.25)])
def test_the_update_is_that_of_a_plain_loop(overlap, mixing):
    strategy = sync.streamed(INNER, OUTER, ROUND, PARTS, overlap=overlap, mixing=mixing)
    loop = Loop(overlap, mixing, 3)
    program = built(strategy, shares=(4, 6, 2))
    for batches in run(program, 12):
        check(program, strategy, loop, batches)


@pytest.mark.parametrize("overlap", [True, False])
def test_each_fragment_has_its_own_error_feedback(overlap):
    wire = comm.top_k(1, of=4)  # whose codes are gathered, and so not rounded again
    strategy = sync.streamed(INNER, OUTER, ROUND, PARTS, overlap=overlap, wire=wire)
    loop, program = Loop(overlap, 0.5, 3, codec_of(wire).fitted(3)), built(strategy, shares=(4, 6, 2))
    for batches in run(program, 12):
        check(program, strategy, loop, batches)
    (number,) = [i for i, x in enumerate(program._parts.engine.op_states[0]) if x[0].shape == (PARTS, 3)]
    close([np.asarray(of_worker[number][0]) for of_worker in program._parts.engine.op_states], loop.left)
    assert (np.abs(loop.left).max(axis=(0, 2)) > 1e-3).all()


def test_leaving_and_joining_workers():
    """Between two steps no message is under way, so changes of members lose nothing; a joining worker starts with z."""
    world = LocalWorld(3)
    strategy, loop = sync.streamed(INNER, OUTER, ROUND, PARTS), Loop(True, 0.5, 3)
    program = built(strategy, world, max_local_batch=12, resizable=True)
    for step, batches in enumerate(run(program, 12), 1):
        check(program, strategy, loop, batches)
        if step == 3:
            world.leave(1)
            loop.own[1] = None, np.zeros(5)
        if step == 7:
            world.join(1)
    assert batches[1] is not None


def test_one_fragment_at_once_is_diloco_to_the_bit():
    strategies = [
        sync.diloco(INNER, EXACT_OUTER, ROUND),
        sync.streamed(INNER, EXACT_OUTER, ROUND, 1, overlap=False, mixing=0),
    ]
    one, other = (built(strategy, shares=(4, 8, 4), global_batch=16) for strategy in strategies)
    for _ in range(8):
        one.step(), other.step()
        np.testing.assert_array_equal(vector(other.state.params), vector(one.state.params))


def wide(wire=None, fragments=4, **options):
    strategy = sync.streamed(INNER, OUTER, 8, fragments, wire=wire)

    def value_and_grad(params, batch):
        return jax.value_and_grad(lambda p: jnp.tanh(batch["x"] @ p["a"] @ p["b"]).mean())(params)

    def driver(state, batch):
        state, loss = strategy.step(state, value_and_grad, batch)
        return state, {"loss": comm.all_reduce(loss)}

    rng = np.random.default_rng(0)
    params = {"a": rng.normal(size=(4, 256)), "b": rng.normal(size=(256, 60))}
    given = {"per_worker_state": strategy.per_worker_state, "global_batch": 16, "world": LocalWorld(2)}
    return ad.Program(driver, strategy.init(params), data(), resizable=False, **given, **options)


def test_fragments_travel_in_few_bits():
    assert wide("4bit").step().message_bytes < wide().step().message_bytes / 14


def test_a_checkpoint_between_two_fragments():
    program, other = wide(), wide()
    for _ in range(3):
        program.step()
    other.restore(program.checkpoint())
    for _ in range(3):
        program.step(), other.step()
    for a, b in zip(jax.tree.leaves(states(program)), jax.tree.leaves(states(other)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((INNER, 3, 4, 2), {}, "outer=3 is not an optax optimizer"),
        ((INNER, OUTER, 0, 2), {}, "steps=0 must be a positive integer"),
        ((INNER, OUTER, 4, 1.5), {}, "fragments=1.5 must be a positive integer"),
        ((INNER, OUTER, 5, 2), {}, "steps=5 must be a multiple of fragments=2"),
        ((INNER, OUTER, 4, 2), {"mixing": 1}, "mixing=1 must be at least 0 and below 1"),
        ((INNER, OUTER, 4, 2), {"wire": jnp.bfloat16, "rounding": "error_feedback"}, "is for compressed formats"),
        (
            (INNER, OUTER, 4, 2),
            {"wire": comm.top_k(3), "rounding": "nearest"},
            "loses the elements that comm.top_k",
        ),
        ((INNER, OUTER, 4, 2), {"rounding": "stochastic"}, "needs a format to round to"),
    ],
)
def test_meaningless_arguments_are_refused(arguments, options, text):
    with pytest.raises(CollectiveError, match=text):
        sync.streamed(*arguments, **options)


def test_parameters_that_are_no_floats_are_refused():
    with pytest.raises(CollectiveError, match="must be real floats to be cut into fragments, not int"):
        sync.streamed(INNER, OUTER, 4, 2).init({"n": jnp.arange(3)})
