"""Which arrays a program holds: none of its initial state but local leaves, and none twice."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive.program.explain import memory_needed
from adaptive.runtime import worker_state as _worker_state
from adaptive.runtime.local_world import LocalWorld
from adaptive.runtime.message import LARGE_BYTES
from adaptive.runtime.worker_state import copied

N = 1000  # elements of a leaf: no other array of these tests has as many


def driver(state, batch):
    params, momentum, steps = state
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(batch["x"]) * jnp.mean(p["w"] ** 2) + p["b"])(params)
    grads = comm.all_reduce(grads)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum)
    return (params, momentum, steps + 1), {"loss": comm.all_reduce(loss)}


def of_leaves():
    """The live arrays that are leaves of a state."""
    gc.collect()
    return [a for a in jax.live_arrays() if a.shape == (N,)]


def build(state, workers=1, **options):
    data = {"x": np.linspace(0.5, 1.5, 24, dtype=np.float32)}
    return ad.Program(driver, state, data, global_batch=6, world=LocalWorld(workers), **options)


def initial(module=jnp):
    params = {"w": module.ones(N, "float32"), "b": module.zeros((), "float32")}
    return params, jax.tree.map(lambda leaf: 0 * leaf, params), 0


@pytest.fixture
def before():
    return len(of_leaves())


@pytest.mark.parametrize("resizable", [False, True])
def test_no_array_of_the_initial_state_is_held(resizable, before):
    state = initial()
    arrays = [weakref.ref(leaf) for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    with build(state, resizable=resizable) as program:
        assert len(of_leaves()) == before + 4  # the user's and the program's
        del state
        gc.collect()
        assert [ref() for ref in arrays] == [None] * 4
        assert len(of_leaves()) == before + 2
        program.step()
        program.warm_up()
        program.step()
        assert len(of_leaves()) == before + 2


@pytest.mark.parametrize("workers", [1, 2])
def test_a_state_that_a_function_returns_is_never_held_twice(workers, before, monkeypatch):
    made, most = [], []

    def state():
        values = initial()
        made.extend(weakref.ref(leaf) for leaf in jax.tree.leaves(values) if isinstance(leaf, jax.Array))
        return values

    def counted(leaf, device):
        most.append(len(of_leaves()) - before)
        return copied(leaf, device)

    monkeypatch.setattr(_worker_state, "copied", counted)
    with build(state, workers) as program, build(initial()) as other:
        assert [ref() for ref in made] == [None] * 4
        assert max(most[: 5 * workers]) <= 2 + workers  # the leaf that is copied, and what all others are in by now
        program.step(), other.step()
        if workers == 1:
            jax.tree.map(np.testing.assert_array_equal, program.state, other.state)


@pytest.mark.parametrize("module", [jnp, np], ids=["jax", "numpy"])
def test_the_users_arrays_stay_valid_and_unchanged(module):
    state = initial(module)
    with build(state) as program:
        program.step()
        program.step()
        np.testing.assert_array_equal(state[0]["w"], np.ones(N, np.float32))
        np.testing.assert_array_equal(state[1]["w"], np.zeros(N, np.float32))


def keeps_own(state, batch):
    shared, own = state
    mean = batch["x"].mean()
    return (shared + comm.all_reduce(mean), own + mean), {}


def test_initial_values_of_local_leaves_are_kept(before):
    """Workers that join begin with it, so it is held once beside each worker's own."""
    state, data = (jnp.zeros(N), jnp.zeros(N)), {"x": np.ones(24, np.float32)}
    with ad.Program(
        keeps_own, state, data, global_batch=6, world=LocalWorld(2), per_worker_state=lambda s: s[1]
    ) as program:
        del state
        assert len(of_leaves()) == before + 2 * 2 + 1
        program.step()
        assert len(of_leaves()) == before + 2 * 2 + 1


def adam(state, batch):
    """Adam written out: two moments use the averaged gradient, which is large enough for its own part."""
    w, m, v = state
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(batch["x"]) * jnp.mean(jnp.sin(w)))(w)
    grad = comm.all_reduce(grad)
    m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
    return (w - 0.1 * m / (jnp.sqrt(v) + 1e-8), m, v), {"loss": comm.all_reduce(loss)}


def test_the_update_needs_no_temporary_for_averaged_gradients():
    state, data = tuple(jnp.full(LARGE_BYTES, x) for x in (1.0, 0.0, 0.0)), {"x": np.ones(24, np.float32)}
    with ad.Program(adam, state, data, global_batch=6, world=LocalWorld(2), resizable=False) as program:
        program.step()
        (final,) = {
            id(p): p for (kind, *_), p in program._parts.engine.context.programs.items() if kind == "final"
        }.values()
        assert final.run.memory_analysis().temp_size_in_bytes < LARGE_BYTES
        with jax.disable_jit():
            by_hand, _ = adam(state, data)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), program.state, by_hand)


@pytest.mark.parametrize("workers", [1, 2])
def test_explain_lists_memory(workers):
    """Between two steps: the state, slots and constants, of each worker."""
    table = jnp.arange(8, dtype=jnp.float32)

    def smoothed(state, batch):
        (params, momentum, steps), metrics = driver(state, batch)
        return (params, momentum, steps), {"smooth": mon.ema(metrics["loss"]) + table.sum()}

    gc.collect()
    before = sum(a.nbytes for a in jax.live_arrays())
    data = {"x": np.linspace(0.5, 1.5, 24, dtype=np.float32)}
    with ad.Program(smoothed, initial(), data, global_batch=6, world=LocalWorld(workers), resizable=False) as program:
        for _ in range(2):
            metrics = program.step().metrics
        del metrics
        gc.collect()
        held = sum(a.nbytes for a in jax.live_arrays()) - before
        needed = needed_by(program)
        lasting = needed["state"] + needed["operator states"] + needed["constants"]
        if workers == 1:
            # What sources say while sizes stay.
            fed = [vector for fed in program._parts.engine._host_step._schedule._fed for vector in fed.device]
            assert held == lasting + sum(a.nbytes for a in fed) + 4  # and where the microbatch starts
        else:  # workers of one device share constants, and scalars that are equal
            assert abs(held - workers * lasting) <= needed["constants"]
        assert needed["state"] == 4 * (2 * N + 2) + 4
        assert needed["batches"] == 2 * 6 // workers * 4
        assert needed["data set"] == 24 * 4
        assert ("receive buffers" in needed) == (workers > 1)


def needed_by(program):
    return {n.what: n.nbytes for n in memory_needed(program._parts.engine, program._parts.data, program.batch_sizes)}


def parts(program):
    """The bytes of messages' parts that a worker holds, by what is explained."""
    return needed_by(program)["parts of messages"] / sum(layout.nbytes for layout in program._parts.engine.layouts)


@pytest.mark.parametrize(
    ("options", "held", "whole"),
    [
        ({}, 2, True),  # two for other sizes
        ({"resizable": False}, 1, True),
        ({"resizable": False, "microbatch": 4}, 2, False),
        ({"deterministic": True}, 2, False),  # 4 + 2
    ],
)
def test_explain_says_whether_a_step_holds_two_gradients(options, held, whole):
    with build(initial(), **options) as program:
        assert parts(program) == held
        program.step()
        program.warm_up()
        assert parts(program) == held
        assert (program.step().microbatches[0] == (6,)) == whole
        if not options:
            program.rescale(global_batch=10)
            assert len(program.step().microbatches[0]) == 2
            assert parts(program) == 2


@pytest.mark.parametrize("world", [comm.SoloWorld, lambda: comm.DeviceWorld(jax.devices()[:2])], ids=["one", "devices"])
def test_a_program_without_references_frees_its_arrays_at_once(world):
    """And not when cycles are collected, which may be much later."""

    def driver(w, batch):
        grads = jax.grad(lambda w: ((batch["x"] @ w) ** 2).mean())(w)
        return w - 0.1 * comm.all_reduce(grads), {}

    with world() as there:
        data = {"x": np.ones((64, 16), np.float32)}
        program = ad.Program(driver, jnp.ones((16, 16)), data, global_batch=16, world=there, deterministic=True)
        for _ in program.run(steps=6):
            pass
        program.close()
        known = weakref.ref(program), weakref.ref(program._parts.engine)
        gc.collect()
        gc.disable()
        try:
            del program
            assert [one() for one in known] == [None, None]
        finally:
            gc.enable()
