"""Rounds by quorum, against a plain loop of their update and `diloco`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import collectives.strategies as sync
from adaptive import CollectiveError
from adaptive.base.mailbox import Mailbox
from adaptive.operators.round_clock import RoundClock, _until_quorum
from adaptive.runtime.local_world import LocalWorld
from tests.collectives.linear import FIRST, close, gradient, states, steps, vector

from .test_islands import INNER, OUTER, RATE, built

pytestmark = pytest.mark.usefixtures("double_precision")

STEPS = 4


class Scripted(LocalWorld):
    """Tells each worker after `stop_after[worker]` local steps of a round that all others have finished long ago."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.stop_after, self.published = {}, {}

    def create_mailbox(self, nbytes, about, instead_of=None):
        world = self

        class Own:
            def publish(self, worker, round, vectors):
                place = world.published.setdefault((round, worker), [])
                place.append(float(vectors[0].view(np.float32)[0]))

            def look(self, worker, reader, round):
                if len(world.published[round, reader]) < world.stop_after.get(reader, 99):
                    return None
                return [np.zeros(3, np.float32).view(np.uint8)]

        return Own()


class Loop:
    """The documented update in numpy, with momentum as inner and Nesterov's as outer optimizer."""

    def __init__(self, workers, quorum=None):
        self.quorum, self.z, self.outer = quorum, FIRST, np.zeros(5)
        self.own = [(np.zeros(5), np.zeros(5), 0, 0)] * workers  # change, momentum, steps and their examples
        self.counted = None

    def step(self, batches, stop_after):
        there = [i for i, batch in enumerate(batches) if batch is not None]
        for i in there:
            behind, momentum, taken, examples = self.own[i]
            x, n = self.z - behind, len(batches[i]["y"]) // STEPS
            for part in range(min(STEPS, stop_after.get(i, STEPS))):
                minibatch = {name: a[part * n : (part + 1) * n] for name, a in batches[i].items()}
                momentum = 0.5 * momentum + gradient(x, minibatch)
                x, taken, examples = x - RATE * momentum, taken + 1, examples + n
            self.own[i] = self.z - x, momentum, taken, examples
        needed = len(there) // 2 + len(there) % 2 + 1 if self.quorum is None else self.quorum
        needed = min(max(needed, len(there) // 2 + 1), len(there))
        done = [i for i in there if self.own[i][2] >= STEPS]
        self.counted = len(done) if len(done) >= needed else 0
        if self.counted:
            weights = {i: float(np.float32(self.own[i][3] / self.own[i][2])) for i in done}  # sent in float32
            change = sum(w * self.own[i][0] for i, w in weights.items()) / sum(weights.values())
            self.outer = change + 0.9 * self.outer
            self.z = self.z - 0.7 * (change + 0.9 * self.outer)
            for i in done:
                self.own[i] = np.zeros(5), self.own[i][1], 0, 0


def check(program, loop, batches):
    for i, (batch, (behind, _, taken, examples), state) in enumerate(
        zip(batches, loop.own, states(program), strict=True)
    ):
        if batch is not None:
            close(vector(state.params), loop.z)
            close(vector(state.behind), behind)
            assert (state.counted, state.taken, state.examples) == (loop.counted, taken, examples), i


def scripts(seed, workers, rounds):
    """After how many local steps each worker stops; sometimes so many of them that no round closes."""
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        yield {i: int(rng.integers(1, STEPS + 1)) for i in range(workers) if rng.random() < 0.6}


@pytest.mark.parametrize(
    ("quorum", "expected"),
    [
        (None, {0, 3, 4}),
        pytest.param(1, {0, 3, 4}, marks=pytest.mark.long),
        pytest.param(4, {4}, marks=pytest.mark.long),
    ],
)
def test_the_update_is_that_of_a_plain_loop(quorum, expected):
    world, loop, counted = Scripted(4), Loop(4, quorum), []
    program = built(sync.quorum(INNER, OUTER, STEPS, quorum=quorum), world, shares=(4, 4, 8, 4), global_batch=20)
    each, script = steps(program, 24), scripts(0, 4, 24)
    for world.stop_after in script:
        batches = next(each)
        loop.step(batches, {} if quorum == 4 else world.stop_after)  # if all are needed, none is late
        check(program, loop, batches)
        counted.append(loop.counted)
    assert set(counted) == expected


def test_a_leaving_workers_change_is_lost_and_a_joining_worker_starts_with_the_model():
    world, loop = Scripted(4), Loop(4, quorum=1)
    options = {"global_batch": 16, "max_local_batch": 16, "resizable": True}
    program = built(sync.quorum(INNER, OUTER, STEPS, quorum=1), world, **options)
    seen, each = [], steps(program, 16)
    for step, script in enumerate(scripts(1, 4, 16), 1):
        world.stop_after = script  # before the step
        batches = next(each)
        loop.step(batches, world.stop_after)
        check(program, loop, batches)
        if step == 5:
            world.leave(2)
            loop.own[2] = (np.zeros(5), np.zeros(5), 0, 0)
        if step == 9:
            world.join(2)
        seen.append(sum(batch is not None for batch in batches))
    assert set(seen) == {3, 4}
    assert seen[-1] == 4


class Paced(Mailbox):
    """A mailbox in which the other workers have published how many seconds they need."""

    def __init__(self, seconds):
        super().__init__()
        for worker, value in seconds.items():
            self.publish(worker, 7, [np.array([value, 0, 0], np.float32).view(np.uint8)])


class Moments:
    """A clock that shows these seconds, one after another."""

    def __init__(self, moments):
        self._moments = iter(moments)

    def monotonic(self):
        return next(self._moments)


@pytest.mark.parametrize(
    ("missing", "others", "grace", "expected"),
    [
        (8, {1: 8, 2: 8, 3: 8}, 0.0, 8),  # as fast as the others: finished with them
        (8, {1: 6, 2: 6, 3: 6}, 0.0, 6),  # late: no step that would end after the quorum
        (8, {1: 6, 2: 6, 3: 6}, 0.2, 7),
        (8, {1: 6, 2: 6}, 0.0, 8),  # without its own steps there is no quorum
        (8, {1: 2, 2: 2, 3: 40}, 0.0, 8),
        (2, {1: 6, 2: 6, 3: 6}, 0.5, 6),  # finished after two, and goes on until the quorum has
        (8, {1: 0.1, 2: 0.1, 3: 0.1}, 0.0, 1),  # a step in each round
    ],
)
def test_a_late_worker_takes_further_steps(monkeypatch, missing, others, grace, expected):
    """A worker of one second a step; three of four are the quorum."""
    monkeypatch.setattr("adaptive.operators.round_clock.time", Moments(range(100, 200)))
    mailboxes = type("Mailboxes", (), {"mailboxes": [Paced(others)], "members": (0, 1, 2, 3)})()
    clock, taken = RoundClock(mailboxes, "quorum", (12,), "quorum", place=0, grace=grace), 0
    while clock(np.array([0, 7, 0]), np.array([missing - taken, taken, 3], np.float32))[0][0] and taken < 8:
        taken += 1
    assert taken == expected


def test_seconds_of_too_few_workers_are_no_quorum():
    assert _until_quorum([3.0, 1.0, 2.0], 2) == 2
    assert _until_quorum([3.0], 2) == float("inf")


def test_outside_a_program_it_is_one_worker():
    strategy = sync.quorum(INNER, OUTER, 2)
    state = strategy.init(jnp.ones(()))
    state, loss = strategy.step(state, jax.value_and_grad(lambda p, x: ((p - x) ** 2).mean()), jnp.zeros(4))
    assert state.counted == 1
    assert 0 < strategy.model(state) < 1
    assert 0 < loss <= 1


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((3, OUTER, 4), {}, "inner=3 is not an optax optimizer"),
        ((INNER, OUTER, 0), {}, "steps=0 must be a positive integer"),
        ((INNER, OUTER, 4), {"quorum": 0}, "quorum=0 must be a positive integer"),
        ((INNER, OUTER, 4), {"quorum": 0.5}, "quorum=0.5 must be a positive integer"),
        ((INNER, OUTER, 4), {"grace": -0.1}, "grace=-0.1 must be 0 or more"),
        ((INNER, OUTER, 4), {"grace": float("nan")}, "grace=nan must be 0 or more"),
        ((INNER, OUTER, 4), {"wire": "4bit", "rounding": "error_feedback"}, "would mix what different exchanges send"),
    ],
)
def test_meaningless_arguments_are_refused(arguments, options, text):
    with pytest.raises(CollectiveError, match=text):
        sync.quorum(*arguments, **options)
