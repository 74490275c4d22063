"""A step has the driver's results for any split into workers and microbatches, and commits completely or not at all."""

# ruff: noqa: B023  # by_hand's functions are called at once, where they stand

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import adaptive as ad
import collectives as comm
from adaptive import operators
from adaptive.data.stream import Share
from adaptive.graph.flow import Scope
from adaptive.operators.sources import EXAMPLES, MICROBATCHES, OFFSET, Reading, Source, read
from adaptive.runtime import message as _message
from adaptive.runtime.engine import Engine
from adaptive.runtime.kernels import KernelOptions
from adaptive.runtime.local_world import LocalWorld
from adaptive.runtime.step_context import StepContext
from tests.adaptive.drivers import FEATURES, make_data, mean_loss, planned, uncompiled
from tests.relaxed import relaxed_tx

W = jnp.array([0.3, -0.2, 0.1])
KERNELS = KernelOptions(deterministic=True)
grad = jax.grad(mean_loss)


def engine_of(driver, state, workers, examples=4, *, world=None, status=None, finite=False):
    world = world or LocalWorld(workers)

    def plans(size):
        return planned(driver, state, size, workers=workers)

    leaves = jax.tree.leaves(state)
    plans.reference = plans(examples)
    return Engine(StepContext(plans, leaves, world, status=status, kernels=KERNELS, finite=finite))


def step(engine, batch, split, *, number=0, seconds=None):
    """One step on `batch`, where worker i makes the calls `split[i]`."""
    sizes = [sum(microbatches) for microbatches in split]
    starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    batches = tuple(jax.tree.map(lambda a, s=s, e=e: a[s:e], batch) for s, e in pairwise(starts))
    seconds = seconds or [0.1 * (w + 1) for w in range(len(split))]
    there = np.asarray(sizes) > 0
    readings = [
        Reading(number, 0, w, sum(sizes), size, size, 1, start, seconds[w], 1.0, there)
        for w, (size, start) in enumerate(zip(sizes, starts, strict=False))
    ]
    share = Share(tuple(sizes), tuple(starts[:-1]), batches)
    engine.kernels.require_microbatches(split)
    return engine.step(share, readings, microbatches=split)


def run(driver, state, split, data, count=2):
    """Some steps, each on the next rows of `data`: the states of all workers, and the metrics of the last step."""
    engine = engine_of(driver, state, len(split))
    engine.compile_microbatches(split)
    total = sum(map(sum, split))
    for number in range(count):
        outcome = step(
            engine, jax.tree.map(lambda a, n=number: a[n * total : (n + 1) * total], data), split, number=number
        )
    engine.close()
    return engine.states, [np.asarray(m) for m in outcome.metrics]


# --- the split does not matter ----------------------------------------------------------------------------------------


def sharpness_aware(state, batch):
    first = comm.all_reduce(grad(state, batch))
    moved = state + 0.05 * first / jnp.linalg.norm(first)
    return state - 0.1 * comm.all_reduce(grad(moved, batch)), {"norm": jnp.linalg.norm(first)}


def standardized(state, batch):
    """Three messages: a mean, a variance about it, and a gradient of what they standardize; residuals are kept."""
    mean = comm.all_reduce(batch["y"].mean())
    apart = batch["y"] - mean
    variance = comm.all_reduce((apart**2).mean())
    standard = {"x": batch["x"], "y": apart / jnp.sqrt(variance)}
    worst = comm.all_reduce(jnp.abs(standard["y"]).max(), op="max")
    return state - 0.1 * comm.all_reduce(grad(state, standard)), {"variance": variance, "worst": worst}


def per_token(state, batch):
    """A mean over tokens and not over examples: sums of losses, weighed by their number."""
    tokens = jnp.exp(batch["y"]) + 1
    loss = lambda w: jnp.sum(tokens * (batch["x"] @ w - batch["y"]) ** 2) / tokens.sum()  # noqa: E731
    return state - 0.01 * comm.all_reduce(jax.grad(loss)(state), weight=tokens.sum()), {
        "tokens": comm.all_reduce(tokens.sum(), op="sum"),
        "most": comm.all_reduce(tokens.max(), op="max"),
    }


@pytest.mark.parametrize("driver", [standardized, per_token])
def test_three_workers_of_5_2_and_9_take_the_step_of_one(monkeypatch, driver):
    uncompiled(monkeypatch)
    data = make_data(32)
    (alone,), whole = run(driver, W, [(16,)], data)
    states, metrics = run(driver, W, [(2, 3), (1, 1), (4, 4, 1)], data)
    for leaves in states:
        assert all(np.array_equal(a, b) for a, b in zip(leaves, states[0], strict=True))  # to the last bit
    for a, b in zip([*states[0], *metrics], [*alone, *whole], strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


# --- random drivers ---------------------------------------------------------------------------------------------------
#
# A driver of random operations on scalars, as a list of (operation, i, j): each adds its result to a pool of values
# that the later ones draw from. The same list is carried out below in plain numpy, on a table of every worker's every
# call, with scopes derived from the operations alone.

OPERATIONS = ["sine", "cosine", "mean", "weighted", "sum", "max", "min", "gather", "broadcast", "op_state", "pair"]
SECONDS = Source("seconds", lambda r: r.compute_seconds)
Programs = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 99), st.integers(0, 99)), min_size=2, max_size=9
)


def scopes_of(program):
    """The scope of every value of the pool, and the operations as they can be carried out."""
    scopes, done = [Scope.ALL, Scope.ALL, Scope.WORKER, Scope.MICROBATCH], []
    for what, i, j in program:
        i, j = len(scopes) - 1 - i % min(3, len(scopes)), j % (len(scopes) if j % 2 else 4)
        if what in ("gather", "broadcast", "op_state") and scopes[i] == Scope.MICROBATCH:
            what = "mean"  # there is one of these for each worker, not for each of its calls
        done.append((what, i, j))
        results = {"sine": [max(scopes[i], scopes[j])], "op_state": [scopes[i]], "pair": [Scope.ALL] * 2}
        results["cosine"] = results["sine"]  # the other operations reduce, so their results are the same everywhere
        scopes += results.get(what, [Scope.ALL])
    return scopes, done


def driver_of(program):
    scopes, done = scopes_of(program)

    def driver(state, batch):
        pool = [state, 0.1 * ad.step_number().astype(float), read(SECONDS), batch["y"].mean()]
        for what, i, j in done:
            a, b = pool[i], pool[j]
            mixed = a + 0.3 * b
            match what:
                case "sine":
                    pool.append(jnp.sin(a + 2 * b))
                case "cosine":
                    pool.append(jnp.cos(a * b))
                case "mean":
                    pool.append(comm.all_reduce(mixed))
                case "weighted":
                    pool.append(comm.all_reduce(a, weight=0.5 + b * b))
                case "sum":
                    pool.append(0.1 * comm.all_reduce(mixed, op="sum"))
                case "max" | "min":
                    pool.append(comm.all_reduce(mixed, op=what))
                case "gather":
                    rows = comm.all_gather(a)
                    pool.append(jnp.sin(rows @ jnp.arange(1.0, 1 + ad.capacity())))
                case "broadcast":
                    pool.append(comm.broadcast(a, j % ad.capacity()))
                case "op_state":
                    update = lambda old, a=a: (0.5 * old + 0.3 * a, old - 0.1 * a)  # noqa: E731
                    pool.append(operators.operator_state("s", np.full((), 0.25, np.float32), update))
                case "pair":
                    pool += comm.all_reduce((a, b))
        shared = [v for v, scope in zip(pool, scopes, strict=True) if scope == Scope.ALL]
        return jnp.sin(sum(shared)), shared

    return driver


def by_hand(program, state, ys, number, op_states):
    """The new state, the metrics and the op_states: `ys[worker][call]` are that call's examples."""
    scopes, done = scopes_of(program)
    table = [[(w, c) for c in range(len(calls))] for w, calls in enumerate(ys)]
    keys = [key for row in table for key in row]
    everywhere = lambda f: {key: np.float64(f(key)) for key in keys}  # noqa: E731
    pool = [everywhere(lambda _: state), everywhere(lambda _: 0.1 * number)]
    pool += [everywhere(lambda k: 0.1 * (k[0] + 1)), everywhere(lambda k: ys[k[0]][k[1]].mean())]
    examples = everywhere(lambda k: len(ys[k[0]][k[1]]))

    def mean(x, weight, x_scope, w_scope, others=Scope.ALL):
        if max(x_scope, others) == Scope.ALL:
            return x
        counted = keys if max(x_scope, w_scope) == Scope.MICROBATCH else [(w, 0) for w in range(len(ys))]
        value = sum(weight[k] * x[k] for k in counted) / sum(weight[k] for k in counted)
        return everywhere(lambda _: value)

    taken = iter(op_states)
    kept = []
    for what, i, j in done:
        a, b = pool[i], pool[j]
        once = [a[w, 0] for w in range(len(ys))]
        mixed, mixed_scope = everywhere(lambda k: a[k] + 0.3 * b[k]), max(scopes[i], scopes[j])
        match what:
            case "sine":
                pool.append(everywhere(lambda k: np.sin(a[k] + 2 * b[k])))
            case "cosine":
                pool.append(everywhere(lambda k: np.cos(a[k] * b[k])))
            case "mean":
                pool.append(mean(mixed, examples, mixed_scope, Scope.MICROBATCH))
            case "weighted":
                pool.append(mean(a, everywhere(lambda k: 0.5 + b[k] ** 2), scopes[i], scopes[j]))
            case "sum":
                total = sum(x for (_, c), x in mixed.items() if mixed_scope == Scope.MICROBATCH or c == 0)
                pool.append(everywhere(lambda _: 0.1 * total))
            case "max" | "min":
                extreme = {"max": max, "min": min}[what](mixed.values())
                pool.append(everywhere(lambda _: extreme))
            case "gather":
                pool.append(everywhere(lambda _: np.sin(sum(x * (w + 1) for w, x in enumerate(once)))))
            case "broadcast":
                pool.append(everywhere(lambda _: once[j % len(ys)]))
            case "op_state":
                old = next(taken, everywhere(lambda _: 0.25))
                kept.append(everywhere(lambda k: 0.5 * old[k] + 0.3 * a[k]))
                pool.append(everywhere(lambda k: old[k] - 0.1 * a[k]))
            case "pair":
                both = max(scopes[i], scopes[j])
                pool += [mean(x, examples, scopes[n], Scope.MICROBATCH, both) for x, n in ((a, i), (b, j))]
    shared = [next(iter(v.values())) for v, scope in zip(pool, scopes, strict=True) if scope == Scope.ALL]
    return np.sin(sum(shared)), shared, kept


splits = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple), min_size=1, max_size=3)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(Programs, splits, st.integers(0, 9))
def test_random_drivers_give_the_expected_results_on_any_split(monkeypatch, program, split, seed):
    uncompiled(monkeypatch)
    rng = np.random.default_rng(seed)
    engine = engine_of(driver_of(program), jnp.float32(0.4), len(split))
    engine.compile_microbatches(split)
    state, op_states = 0.4, []
    for number in range(2):
        ys = [[rng.normal(size=n).astype(np.float32) for n in calls] for calls in split]
        flat = np.concatenate([y for calls in ys for y in calls])
        batch = {"x": np.zeros((len(flat), FEATURES), np.float32), "y": flat}
        outcome = step(engine, batch, split, number=number)
        state, metrics, op_states = by_hand(program, state, ys, number, op_states)
        np.testing.assert_allclose([float(m) for m in outcome.metrics], metrics, rtol=1e-4, atol=1e-4)
        for (leaf,) in engine.states:
            np.testing.assert_allclose(leaf, state, rtol=1e-3, atol=1e-3)
        state = float(engine.states[0][0])  # so that rounding does not add up
    engine.close()


# --- memory -----------------------------------------------------------------------------------------------------------


def test_values_kept_for_later_survive_the_reduction(monkeypatch):
    monkeypatch.setattr(_message, "LARGE_BYTES", 8)  # so the gradient is sent from the memory that it is kept in

    def driver(state, batch):
        grads = batch["x"].mean(0) + state
        total = comm.all_reduce(grads, op="sum")
        return state + 0.1 * total, {"spread": comm.all_reduce(((grads - total) ** 2).sum(), op="sum")}

    data, split = make_data(7), [(2, 2), (2, 1)]
    engine = engine_of(driver, W, 2)
    engine.compile_microbatches(split)
    outcome = step(engine, data, split)
    rows = np.split(data["x"].astype(np.float64), [2, 4, 6])
    grads = [r.mean(0) + np.asarray(W) for r in rows]
    np.testing.assert_allclose(outcome.metrics[0], sum(((g - sum(grads)) ** 2).sum() for g in grads), rtol=1e-5)
    np.testing.assert_allclose(engine.states[1][0], np.asarray(W) + 0.1 * sum(grads), rtol=1e-5)
    engine.close()


def test_state_that_is_handed_on_and_returned_twice_has_memory_of_its_own():
    def driver(state, batch):
        new = state["new"] + comm.all_reduce(batch["y"].mean())
        return {"new": new, "old": state["new"], "older": state["old"], "still": state["still"]}, {
            "new": new,
            "old": state["new"],
            "still": state["still"],
        }

    state = {"new": jnp.zeros(3), "old": jnp.zeros(3), "older": jnp.zeros(3), "still": jnp.ones(3)}
    engine = engine_of(driver, state, 1)
    engine.compile_microbatches([(4,)])
    data = make_data(4)
    metrics = [step(engine, data, [(4,)], number=number).metrics for number in range(4)]
    mean = data["y"].mean()
    for number, (new, old, still) in enumerate(metrics):  # steps later, none of them was given up to XLA
        np.testing.assert_allclose(new, np.full(3, (number + 1) * mean), rtol=1e-5)
        np.testing.assert_allclose(old, np.full(3, number * mean), rtol=1e-5, atol=1e-7)
        assert np.asarray(still).tolist() == [1, 1, 1]
    values = [float(leaf[0]) for leaf in engine.states[0]]
    np.testing.assert_allclose(values, [4 * mean, 3 * mean, 2 * mean, 1.0], rtol=1e-5)
    engine.close()


# --- whole or not at all ----------------------------------------------------------------------------------------------


class Observed(LocalWorld):
    """A world whose messages fail at a chosen place, and which keeps how many elements of each are the status."""

    broken: int | None = None
    lengths: tuple[int, ...] = ()

    def exchange(self, message, ops, name=0):
        if self.broken == name[1]:
            raise OSError("the network is down")
        self.lengths += (len(message.status),)
        return super().exchange(message, ops, name)


class Heard:
    """A status of two elements that keeps what it hears."""

    length = 2

    def __init__(self):
        self.said, self.heard = 0, []

    def encode(self):
        self.said += 1
        return np.array([float(self.said), 0.5])

    def decode(self, elements):
        self.heard.append(elements.tolist())


def test_the_last_message_of_a_step_carries_the_status():
    world, status, data = Observed(2), Heard(), make_data(6)
    engine = engine_of(sharpness_aware, W, 2, world=world, status=status)
    engine.compile_microbatches([(2, 1), (3,)])
    for number in range(2):
        step(engine, data, [(2, 1), (3,)], number=number)
    assert [layout.status for layout in engine.layouts] == [0, 2]
    assert world.lengths == (0, 2) * 2
    assert (status.said, status.heard) == (2, [[1.0, 0.5], [2.0, 0.5]])
    engine.exchange_status("the end of a run", "")  # by itself
    assert status.heard[2:] == [[3.0, 0.5]]
    engine.close()


def test_a_failing_message_leaves_the_state_unchanged():
    world, data = Observed(2), make_data(6)
    engine = engine_of(sharpness_aware, W, 2, world=world)
    split = [(2, 1), (3,)]
    engine.compile_microbatches(split)
    step(engine, data, split)
    before = engine.states, engine.op_states
    expected = [np.asarray(leaves[0]) for leaves in before[0]]
    for broken in (0, 1, None):
        world.broken = broken
        if broken is not None:
            with pytest.raises(OSError, match="network"):
                step(engine, data, split)
        assert all(np.array_equal(leaves[0], old) for leaves, old in zip(engine.states, expected, strict=True))
    step(engine, data, split)
    once_more = [np.asarray(leaves[0]) for leaves in engine.states]
    engine.workers.replace([[old] for old in expected], before[1])
    step(engine, data, split)
    assert all(np.array_equal(leaves[0], new) for leaves, new in zip(engine.states, once_more, strict=True))
    engine.close()


def test_nothing_is_computed_after_a_message_that_is_not_finite():
    def driver(state, batch):
        scale = comm.all_reduce(jnp.abs(batch["y"]).max(), op="max")
        return state - 0.1 * comm.all_reduce(grad(state, {**batch, "y": batch["y"] / scale})), {}

    engine = engine_of(driver, W, 2, finite=True)
    split = [(2,), (1, 1)]
    engine.compile_microbatches(split)
    data = make_data(4)
    data["y"][0] = np.inf
    levels = []
    kernel = engine.kernels.kernel

    def counted(local, size, level):
        found = kernel(local, size, level)
        return replace(found, run=lambda *args: levels.append(level) or found.run(*args))

    engine.kernels.kernel = counted
    outcome = step(engine, data, split)
    assert set(levels) == {0}
    assert (outcome.messages, outcome.message_bytes) == (1, engine.layouts[0].nbytes)
    assert np.isnan(outcome.compute_seconds).all()  # of half a step nobody learns how fast a worker is
    engine.close()


# --- what sources read ------------------------------------------------------------------------------------------------


def test_a_measurement_is_read_once_per_worker_and_step():
    taken = []
    load = Source("load", lambda r: taken.append(r.worker) or 2.0 + r.worker)

    def driver(state, batch):
        return state + comm.all_reduce(read(load), op="sum"), {"y": comm.all_reduce(batch["y"].mean())}

    engine = engine_of(driver, 0.0, 2)
    split = [(1, 2, 1), (2,)]
    engine.compile_microbatches(split)
    step(engine, make_data(6), split)
    assert sorted(taken) == [0, 1]
    assert float(engine.states[0][0]) == 2.0 + 3.0
    engine.close()


def test_microbatches_know_their_examples_and_offsets():
    def driver(state, batch):
        count, place = read(EXAMPLES), read(OFFSET).astype(jnp.float32)
        return state, {
            "examples": comm.all_reduce(count, op="sum"),
            "squares": comm.all_reduce(count**2, op="sum"),
            "places": comm.all_reduce(place, op="sum"),
            "calls": comm.all_reduce(read(MICROBATCHES), op="sum"),
            "y": comm.all_reduce(batch["y"].mean()),
        }

    engine = engine_of(driver, 0.0, 2)
    split = [(1, 2, 1), (2,)]
    engine.compile_microbatches(split)
    outcome = step(engine, make_data(6), split)
    found = jax.tree.unflatten(engine.plan.graph.metrics_tree, [float(m) for m in outcome.metrics])
    del found["y"]
    assert found == {"examples": 6, "squares": 1 + 4 + 1 + 4, "places": 0 + 1 + 3 + 4, "calls": 4}
    engine.close()


# --- devices ----------------------------------------------------------------------------------------------------------


def test_closed_over_arrays_are_on_every_workers_device():
    first = jax.device_put(jnp.arange(1.0, 4), jax.local_devices()[0])
    table = jnp.arange(3.0)

    def driver(state, batch):
        grads = comm.all_reduce(grad(state, {**batch, "x": batch["x"] * first[None]}))
        moved = state - 0.1 * grads * table
        return moved - 0.1 * comm.all_reduce(grad(moved * first, batch)), {}

    data, split = make_data(7), [(2,), (3, 1), (1,)]
    with comm.DeviceWorld(jax.local_devices()[:3]) as world:
        engine = engine_of(driver, W, 3, world=world)
        engine.compile_microbatches(split)
        for _ in range(2):
            step(engine, data, split)
        assert [next(iter(leaves[0].devices())) for leaves in engine.states] == list(world.devices)
        results = [np.asarray(leaves[0]) for leaves in engine.states]
        engine.close()
    alone = engine_of(driver, W, 1)
    alone.compile_microbatches([(7,)])
    for _ in range(2):
        step(alone, data, [(7,)])
    alone.close()
    assert all(np.array_equal(r, results[0]) for r in results)
    np.testing.assert_allclose(results[0], alone.states[0][0], rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads what XLA compiles for CPUs")
def test_new_state_takes_the_memory_of_the_old_without_a_copy():
    # Leaves of one shape (a weight and its two moments) must be paired as they are named, or XLA copies them first.
    optimizer = relaxed_tx(optax.adam(1e-3))

    def driver(state, batch):
        params, opt_state = state
        grads = comm.all_reduce(jax.grad(lambda p: ((batch["x"] @ p["w"] + p["b"]) ** 2).mean())(params))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {}

    params = {"w": jnp.zeros((3, 2)), "b": jnp.zeros((1, 2))}
    data = {"x": np.ones((8, 3), np.float32)}
    with ad.Program(driver, (params, optimizer.init(params)), data, global_batch=8) as program:
        program.step()
        final = program._parts.engine.context.programs["final", 0, 0].run.as_text()
    assert "input_output_alias" in final
    assert " copy(" not in final
