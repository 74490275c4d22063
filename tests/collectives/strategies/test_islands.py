"""Islands, against plain loops of their update, `synchronous` and `diloco`."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import collectives.strategies as sync
import monitors as mon
from adaptive import CollectiveError
from adaptive.runtime.local_world import LocalWorld
from tests.collectives.linear import FIRST, PARAMS, close, data, gradient, mean_loss, states, steps, vector

pytestmark = pytest.mark.usefixtures("double_precision")

RATE, STEPS = 2.0**-6, 3
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


def built(strategy, world=None, examples=None, **options):
    def driver(state, batch):
        state, loss = strategy.step(state, jax.value_and_grad(mean_loss), batch)
        return state, {"loss": comm.all_reduce(loss)}

    given = {"global_batch": 12, "world": world or LocalWorld(3), "resizable": False} | options
    return ad.Program(
        driver, strategy.init(PARAMS), examples or data(), per_worker_state=strategy.per_worker_state, **given
    )


# Products with powers of two are exact, so that it does not matter with which sums XLA fuses them.
EXACT_OUTER = optax.sgd(0.5, momentum=0.5, nesterov=True)


class Loop:
    """The published update in numpy, with momentum as inner and Nesterov's as outer optimizer.

    A worker's replica and momentum are None while it waits for the end of a round.
    """

    def __init__(self, groups):
        self.groups, n = groups, sum(map(len, groups))
        self.z, self.outer = FIRST, np.zeros(5)
        self.own = [(FIRST, np.zeros(5))] * n
        self.examples, self.taken = [0] * len(groups), 0

    def step(self, batches):
        self.taken += 1
        those = [[i for i in group if batches[i] is not None and self.own[i] is not None] for group in self.groups]
        changed = {}
        for number, current in enumerate(those):
            if current:
                x, momentum = self.own[current[0]]
                sizes = [len(batches[i]["y"]) for i in current]
                mean = sum(b * gradient(x, batches[i]) for b, i in zip(sizes, current, strict=True)) / sum(sizes)
                momentum = mean + 0.5 * momentum
                changed[number] = x - RATE * momentum, momentum
                self.examples[number] += sum(sizes)
        ends = self.taken % STEPS == 0
        if ends:
            total = sum(self.examples[number] for number in changed)
            change = self.z - sum(self.examples[number] * x for number, (x, _) in changed.items()) / total
            if len(changed) == 1:
                self.z = self.z - change
            else:
                self.outer = change + 0.9 * self.outer
                self.z = self.z - 0.7 * (change + 0.9 * self.outer)
                changed = {number: (self.z, momentum) for number, (_, momentum) in changed.items()}
            self.examples = [0] * len(self.groups)
        for number, (group, current) in enumerate(zip(self.groups, those, strict=True)):
            for i in group:
                if batches[i] is None:
                    self.own[i] = None
                elif i in current or (ends and current):
                    self.own[i] = changed[number]
                elif not current:  # it founds the island again
                    self.own[i] = self.z, np.zeros(5)


INNER = optax.sgd(RATE, momentum=0.5)


def test_the_update_is_that_of_a_plain_loop():
    groups = [[0, 2], [1]]
    strategy, loop = sync.islands(INNER, OUTER, STEPS, groups), Loop(groups)
    program = built(strategy, shares=(4, 6, 2), microbatch=2)
    for batches in steps(program, 20):
        loop.step(batches)
        for (x, _), state in zip(loop.own, states(program), strict=True):
            close(vector(state.replica), x)
            close(vector(strategy.model(state)), loop.z)
        for of_island in ("replica", "inner"):
            one, _, other = (jax.tree.leaves(getattr(state, of_island)) for state in states(program))
            for a, b in zip(one, other, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("groups", [pytest.param([[0, 1], [2, 3]], marks=pytest.mark.long), [[0, 3], [1], [2]]])
def test_leaving_and_joining_workers(groups):
    """A lost worker leaves its island's state to the others; a joining one waits for the end of a round."""
    world = LocalWorld(4)
    strategy, loop = sync.islands(INNER, OUTER, STEPS, groups), Loop(groups)
    program = built(strategy, world, global_batch=24, microbatch=2, resizable=True)
    for step, batches in enumerate(steps(program, 24), 1):
        loop.step(batches)
        for batch, own, state in zip(batches, loop.own, states(program), strict=True):
            if batch is not None:
                close(vector(strategy.model(state)), loop.z)
            if own is not None:
                close(vector(state.replica), own[0])
        if step == 4:
            world.leave(1)
        if step == 7:
            world.leave(2), world.leave(0)
        if step == 10:
            world.join(0)
        if step == 12:
            world.join(1), world.join(2)
    assert all(own is not None for own in loop.own)


def test_one_island_is_synchronous_to_the_bit():
    """And while other islands have no worker. Gradients are a difference each, which XLA cannot round in two ways."""

    def simple(strategy, world):
        def driver(state, batch):
            return strategy.step(state, lambda p, b: (b["y"].sum(), p - b["x"].sum(0)), batch)[0], {}

        given = {"per_worker_state": strategy.per_worker_state, "global_batch": 12, "microbatch": 1, "world": world}
        return ad.Program(driver, strategy.init(np.zeros(4)), data(), max_local_batch=12, **given)

    world = LocalWorld(4)
    world.leave(3)
    strategies = [sync.synchronous(INNER), sync.islands(INNER, OUTER, STEPS, [[0, 1, 2], [3]])]
    one, other = (simple(strategy, world) for strategy in strategies)
    for step in range(1, 9):
        one.step(), other.step()
        np.testing.assert_array_equal(other.state.replica, one.state.params)
        if step % STEPS == 0:
            close(other.state.params, one.state.params)


def test_islands_of_one_are_diloco_also_in_few_bits():
    """With batches whose weights are powers of two, and so divide exactly. XLA rounds some sums of loops elsewhere."""
    rng, sizes = np.random.default_rng(0), (4, 8, 4)
    shards = [{"x": (x := rng.normal(size=(96, 4))), "y": x @ np.arange(4.0)} for _ in sizes]
    options = {"wire": "8bit", "rounding": "nearest"}
    strategies = {
        "rounds": sync.diloco(INNER, EXACT_OUTER, STEPS, **options),
        "steps": sync.islands(INNER, EXACT_OUTER, STEPS, [[0], [1], [2]], **options),
    }
    each = {"rounds": STEPS, "steps": 1}
    programs = {
        name: built(
            strategies[name],
            examples=ad.Shards(shards),
            global_batch=n * sum(sizes),
            shares=[n * size for size in sizes],
        )
        for name, n in each.items()
    }
    for _ in range(8):
        programs["rounds"].step()
        for _ in range(STEPS):
            programs["steps"].step()
        for a, b in zip(*map(states, programs.values()), strict=True):
            np.testing.assert_allclose(vector(b.params), vector(a.params), rtol=1e-14, atol=1e-14)
            for one, other in zip(jax.tree.leaves(a.inner), jax.tree.leaves(b.inner), strict=True):
                np.testing.assert_allclose(other, one, rtol=1e-14, atol=1e-14)


def test_the_noise_scale_is_that_within_islands():
    """By the sums of squares of the groups of each island, in numpy; and of one island as without islands."""
    groups = [[0, 1], [2]]

    def program_of(strategy, **options):
        def driver(state, batch):
            found = strategy.step_with_gradients(state, jax.value_and_grad(mean_loss), batch)
            return found[0], {"noise": mon.noise_scale(found[2], found[3], decay=0, **options)}

        return ad.Program(
            driver,
            strategy.init(PARAMS),
            data(),
            per_worker_state=strategy.per_worker_state,
            global_batch=12,
            shares=(4, 6, 2),
            microbatch=2,
            world=LocalWorld(3),
            resizable=False,
        )

    program = program_of(sync.islands(INNER, OUTER, STEPS, groups), islands=groups)
    reports = []
    program.subscribe(lambda event: reports.append(event.report))
    (batches,) = steps(program, 1)
    noise = reports[0].metrics["noise"]
    parts = [[jax.tree.map(lambda x, n=n: x[n : n + 2], b) for n in range(0, len(b["y"]), 2)] for b in batches]
    means = [[gradient(FIRST, part) for part in of_worker] for of_worker in parts]
    of_islands = [[*means[0], *means[1]], means[2]]
    squares = sum(2 * g @ g for of_island in of_islands for g in of_island)
    averaged = [(2 * len(found), np.mean(found, 0)) for found in of_islands]
    weighed = sum(b * g @ g for b, g in averaged)
    trace = (squares - weighed) / (6 - 2)
    close([noise.trace, noise.signal], [trace, weighed / 12 - 2 * trace / 12])
    whole = [[0, 1, 2]]
    one = program_of(sync.islands(INNER, OUTER, STEPS, whole), islands=whole).step().metrics["noise"]
    other = program_of(sync.synchronous(INNER)).step().metrics["noise"]
    close([one.trace, one.signal], [other.trace, other.signal])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((INNER, "sgd", 2, [[0]]), "outer='sgd' is not an optax optimizer"),
        ((INNER, OUTER, 0, [[0]]), "steps=0 must be a positive integer"),
        ((INNER, OUTER, 2, [0, 1]), "must be lists of workers"),
        ((INNER, OUTER, 2, [[0, 1], [1]]), "which hold each worker"),
        ((INNER, OUTER, 2, [[0], [2]]), "which hold each worker, from 0 on, once"),
    ],
)
def test_meaningless_arguments_are_refused(arguments, text):
    with pytest.raises(CollectiveError, match=text):
        sync.islands(*arguments)


def test_islands_of_another_number_of_workers_are_refused():
    with pytest.raises(CollectiveError, match=r"hold each of the 3 workers(?s:.*)comm.by_host\(world\)"):
        built(sync.islands(INNER, OUTER, STEPS, [[0, 1]]))
