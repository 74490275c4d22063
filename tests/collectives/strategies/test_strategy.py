"""Ways to synchronize on uneven batches, with members that come and go; tests/contract has further ones."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import collectives.strategies as sync
from adaptive import CollectiveError
from adaptive.runtime.local_world import LocalWorld
from tests.collectives.linear import FIRST, PARAMS, close, data, gradient, mean_loss, states, steps, vector
from tests.relaxed import relaxed_tx

pytestmark = pytest.mark.usefixtures("double_precision")

SIZES = (4, 6, 2)
RATE = 0.02
ADAM, OUTER = relaxed_tx(optax.adam(RATE)), optax.sgd(0.7, momentum=0.9, nesterov=True)
value_and_grad = jax.value_and_grad(mean_loss)


def built(strategy, *, world=None, **options):
    def driver(state, batch):
        state, loss = strategy.step(state, value_and_grad, batch)
        return state, {"loss": comm.all_reduce(loss)}

    given = {"shares": SIZES, "global_batch": 12, "world": world or LocalWorld(3), "resizable": False} | options
    return ad.Program(
        driver, strategy.init(PARAMS), data(), **({"per_worker_state": strategy.per_worker_state} | given)
    )


def one_is_missing(strategy):
    """A program whose third worker has left, and its world."""
    world = LocalWorld(3)
    world.leave(2)
    return built(strategy, world=world, shares=None, max_local_batch=12, resizable=True), world


def models(strategy, program):
    return [vector(strategy.model(state)) for state in states(program)]


# --- the published updates --------------------------------------------------------------------------------------------


def test_model_averaging_is_crossbows_algorithm():
    alpha, mu, n = 0.2, 0.5, len(SIZES)
    strategy = sync.model_averaging(optax.sgd(RATE), alpha=alpha, momentum=mu)
    program = built(strategy, microbatch=2)
    z = before = FIRST
    ws = [FIRST] * n
    for batches in steps(program, 4):
        c = [alpha * (w - z) for w in ws]
        ws = [w - RATE * gradient(w, b) - ci for w, b, ci in zip(ws, batches, c, strict=True)]
        total = n * sum(len(b["y"]) / 12 * ci for b, ci in zip(batches, c, strict=True))
        z, before = z + total + mu * (z - before), z
        for w, state in zip(ws, states(program), strict=True):
            close(vector(strategy.model(state)), z)
            close(vector(strategy.replica(state)), w)


def test_pair_averaging_is_the_mean_of_old_neighbors_minus_the_update_at_the_old_parameters():
    strategy = sync.pair_averaging(optax.sgd(RATE), "ring")
    program = built(strategy, microbatch=2)
    xs = [FIRST] * 3
    for batches in steps(program, 4):
        xs = [sum(xs) / 3 - RATE * gradient(x, b) for x, b in zip(xs, batches, strict=True)]
        close(models(strategy, program), xs)
    close(vector(sync.average(program, strategy)), sum(xs) / 3)


@jax.jit
def adam_step(params, opt_state, batch):
    updates, opt_state = ADAM.update(jax.grad(mean_loss)(params, batch), opt_state)
    return optax.apply_updates(params, updates), opt_state


def test_inner_state_persists_over_rounds_and_is_local():
    strategy = sync.local_steps(ADAM, 2)
    program = built(strategy)
    z, own = PARAMS, [ADAM.init(PARAMS)] * 3
    for batches in steps(program, 3):
        xs = []
        for i, batch in enumerate(batches):
            x, n = z, len(batch["y"]) // 2
            for part in (slice(n), slice(n, 2 * n)):
                x, own[i] = adam_step(x, own[i], {name: rows[part] for name, rows in batch.items()})
            xs.append(x)
        z = jax.tree.map(lambda *leaves: np.average(leaves, axis=0, weights=SIZES), *xs)
        close(vector(strategy.model(program.state)), vector(z))


# --- states within larger ones ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["step", "model"])
def test_a_state_that_is_not_the_strategys_is_refused_by_name(what):
    strategy, other = sync.model_averaging(optax.sgd(RATE)), sync.pair_averaging(optax.sgd(RATE), "ring")
    call = getattr(strategy, what)
    more = (value_and_grad, data(8)) if what == "step" else ()
    with pytest.raises(CollectiveError, match=rf"model_averaging.{what}.*a dict. Its state is  state\['a'\]"):
        call({"a": strategy.init(PARAMS)}, *more)
    with pytest.raises(CollectiveError, match=rf"model_averaging.{what}.*Pass the result of strategy.init"):
        call(other.init(PARAMS), *more)


# --- who comes, who goes, who rests -----------------------------------------------------------------------------------

BY_ONE = [
    sync.synchronous(optax.sgd(RATE)),
    sync.model_averaging(optax.sgd(RATE), momentum=0.5),
    sync.pair_averaging(optax.sgd(RATE), "ring"),
    sync.local_steps(optax.sgd(RATE), 2),
    sync.diloco(optax.sgd(RATE), OUTER, 2),
    sync.hybrid(sync.model_averaging(optax.sgd(RATE)), sync.synchronous(optax.sgd(RATE))),
]


def test_a_joining_worker_does_not_count_before_its_first_exchange():
    strategy = sync.pair_averaging(optax.sgd(RATE), [[(0, 1)], [(0, 1)], [(1, 2)]])
    program, world = one_is_missing(strategy)
    while program.steps < 6:
        program.step()
    world.join(2)
    for _ in range(2):  # of the pair that is as it was
        program.step()
        own = states(program)[2]
        np.testing.assert_array_equal(vector(strategy.model(own)), FIRST)
        assert not own.knows
    known = models(strategy, program)
    close(vector(sync.average(program, strategy)), (known[0] + known[1]) / 2)
    program.step()
    taken = states(program)[2]
    assert taken.knows
    close(vector(strategy.model(taken)), known[1])


def test_an_idle_replica_keeps_its_distance_from_the_center():
    strategy = sync.model_averaging(optax.sgd(RATE))
    program = built(strategy, shares=(6, 6, 0))
    z, ws = FIRST, [FIRST] * 2
    for batches in steps(program, 3):
        c = [(w - z) / 2 for w in ws]  # of the two that take examples
        ws = [w - RATE * gradient(w, b) - ci for w, b, ci in zip(ws, batches, c, strict=False)]
        z = z + sum(c)
        close(vector(strategy.model(program.state)), z)
        close(vector(strategy.replica(states(program)[2])), z)


# --- one strategy after another ---------------------------------------------------------------------------------------


def test_a_worker_that_joins_after_the_switch_starts_with_the_common_model():
    strategy = BY_ONE[5]
    program, world = one_is_missing(strategy)
    for step in range(8):
        if step == 3:
            program.set_hyperparameters(synchronous=True)
        if step == 5:
            world.join(2)
        program.step()
    assert len({model.tobytes() for model in models(strategy, program)}) == 1
    assert program.batch_sizes[2] > 0
    program.set_hyperparameters(synchronous=False)  # and back: all begin at the central model
    program.step()
    assert len({vector(state.first.center).tobytes() for state in states(program)}) == 1


# --- with what else there is ------------------------------------------------------------------------------------------


def test_check_reports_that_replicas_differ_on_purpose():
    found = built(BY_ONE[2]).check()
    assert found.verdict == "no"
    assert "not split-invariant, on purpose" in str(found)


def test_evaluate_uses_the_strategys_model():
    """Of pair averaging each worker's replica, on its part of the data."""
    whole, strategy = data(), BY_ONE[2]
    program = built(strategy)
    for _ in range(3):
        program.step()
    found = program.evaluate(lambda state, batch: mean_loss(strategy.model(state), batch), whole, batch=80)
    replicas = models(strategy, program)
    parts = [{k: v[80 * i : 80 * (i + 1)] for k, v in whole.items()} for i in range(3)]
    expected = [np.mean((b["x"] @ v[1:] + v[0] - b["y"]) ** 2) for v, b in zip(replicas, parts, strict=True)]
    close(found, np.mean(expected))
    close(vector(sync.average(program, strategy)), np.mean(replicas, axis=0))


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: sync.synchronous(0.1), r"synchronous.*optimizer=0.1 is not an optax optimizer"),
        (lambda: sync.model_averaging(optax.sgd(1.0), alpha=2), r"alpha=2 must be above 0 and at most 1"),
        (lambda: sync.model_averaging(optax.sgd(1.0), momentum=1.0), r"momentum=1.0 must be at least 0 and below 1"),
        (lambda: sync.model_averaging(optax.sgd(1.0), wire="int8"), r"wire=int8 is not a supported format"),
        (lambda: sync.model_averaging(optax.sgd(1.0), wire="4bit"), r"wire=4bit needs error feedback"),
        (lambda: sync.pair_averaging(optax.sgd(1.0), "star"), r"pair_averaging.*'star' must be one of 'random'"),
        (lambda: sync.local_steps(optax.sgd(1.0), 0), r"local_steps.*steps=0 must be a positive integer"),
        (lambda: sync.diloco(optax.sgd(1.0), "sgd", 2), r"diloco.*outer='sgd' is not an optax optimizer"),
        (lambda: sync.hybrid(BY_ONE[1], optax.sgd(1.0)), r"is not a strategy"),
        (lambda: sync.hybrid(BY_ONE[3], BY_ONE[0]), r"local_steps takes several local steps per step"),
        (lambda: sync.hybrid(BY_ONE[2], BY_ONE[0]), r"pair_averaging has no replicated model"),
    ],
)
def test_meaningless_arguments_are_refused(make, text):
    with pytest.raises(CollectiveError, match=text):
        make()


def test_the_error_about_a_missing_per_worker_state_says_what_to_select():
    strategy = BY_ONE[1]
    with pytest.raises(
        ad.ReplicationError, match=r"per_worker_state=lambda state: state.apart\['b'\]\) +or strategy.per_worker_state"
    ):
        built(strategy, per_worker_state=None)


# --- a checkpoint on another number of workers ------------------------------------------------------------------------

ELASTIC = {
    "diloco, 8 bits": lambda n: sync.diloco(ADAM, OUTER, 2, wire="8bit"),
    "islands": lambda n: sync.islands(ADAM, OUTER, 3, [[0, 1], [2, 3][: n - 2]]),
    "quorum": lambda n: sync.quorum(ADAM, OUTER, 2, quorum=4),
}


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("diloco, 8 bits", 4, 3),
        *(pytest.param(name, *n, marks=pytest.mark.long) for name in ELASTIC for n in ((4, 3), (3, 4))),
    ],
)
def test_a_restore_on_another_number_of_workers_equals_a_leave_or_join(name, before, after):
    """The run has four slots. Also in the middle of a round, and where something is left by rounding."""
    # deterministic: else sizes after the leave depend on which kernels are compiled by then.
    options = {"shares": None, "global_batch": 24, "resizable": True, "max_local_batch": 24, "deterministic": True}
    world = LocalWorld(4, workers=before)
    live = built(ELASTIC[name](4), world=world, **options)
    saved = built(ELASTIC[name](before), world=LocalWorld(before), **options)
    for _ in range(3):
        live.step(), saved.step()
    restored = built(ELASTIC[name](after), world=LocalWorld(after), **options)
    with pytest.raises(ad.CheckpointError, match=f"local state of {before} workers"):
        restored.restore(saved.checkpoint())
    restored.restore(saved.checkpoint(), other_workers_ok=True)
    (world.leave if after < before else world.join)(3)
    for _ in range(4):
        live.step(), restored.step()
    for found, expected in zip(states(restored), states(live)[:after], strict=True):
        jax.tree.map(close, found, expected)


def test_workers_of_different_islands_that_are_in_one_after_a_restore_begin_with_the_model():
    kept, strategies = [], [sync.islands(ADAM, OUTER, 3, groups) for groups in ([[0, 1], [2, 3]], [[0, 2], [1]])]
    program = built(strategies[0], world=LocalWorld(4), shares=None, global_batch=24)
    for _ in range(5):
        program.step()
    other = built(strategies[1], world=LocalWorld(3), shares=None, global_batch=24)
    other.restore(program.checkpoint(), other_workers_ok=True)
    old = states(program)
    assert np.abs(vector(old[0].replica) - vector(old[2].replica)).max() > 1e-3
    for _ in range(4):
        other.step()
        kept.append([vector(state.replica) for state in states(other)])
    # Worker 2 waits for the end of the round, and worker 1, whose island is new, begins with the model.
    close(kept[0][0], kept[0][2])
    for x, _, y in kept[1:]:
        close(x, y)
