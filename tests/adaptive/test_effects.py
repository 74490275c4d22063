"""Effects run once, in the driver's order; values of the host are requested once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import adaptive as ad
import collectives as comm
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import FEATURES, make_data, mean_loss, planned

W = jnp.zeros(FEATURES)
ONE = jax.ShapeDtypeStruct((), jnp.float32)


def run(driver, steps=2, workers=2, **options):
    """The metrics of some steps, each worker's batch in two calls."""
    options = {"microbatch": 3, **options}
    options = {"global_batch": 6 * workers, "world": LocalWorld(workers), "resizable": False, **options}
    with ad.Program(driver, W, make_data(), **options) as program:
        found = [program.step().metrics for _ in range(steps)]
        jax.effects_barrier()
    return found


def sgd(state, batch):
    return state - 0.1 * comm.all_reduce(jax.grad(mean_loss)(state, batch))


def test_loggers_run_once_per_step_and_worker_or_per_microbatch():
    log = []

    def driver(state, batch):
        io_callback(lambda s: log.append(("step", int(s))), None, ad.step_number())
        io_callback(lambda n: log.append(("call", len(n))), None, batch["y"])
        new = sgd(state, batch)
        io_callback(lambda w: log.append(("new", w.tolist())), None, new)
        return new, {"new": new}

    metrics = run(driver)
    per_step = 2  # workers
    assert log.count(("step", 0)) == log.count(("step", 1)) == per_step
    assert log.count(("call", 3)) == 2 * 2 * per_step
    for m in metrics:
        assert log.count(("new", m["new"].tolist())) == per_step
    assert len(log) == 2 * (1 + 2 + 1) * per_step


def test_ordered_effects_keep_their_order():
    log = []

    def note(what):
        return lambda _: log.append(what)

    def driver(state, batch):
        io_callback(note("first"), None, state[0], ordered=True)
        io_callback(note("call"), None, batch["y"][0], ordered=True)
        new = sgd(state, batch)
        io_callback(note("behind"), None, new[0], ordered=True)
        return new, {}

    run(driver, steps=2, workers=1)
    assert log == ["first", "call", "call", "behind"] * 2


def test_an_effect_makes_its_operands_travel():
    seen = []

    def driver(state, batch):
        mean = comm.all_reduce(batch["y"].mean())  # nobody else asks for it
        io_callback(lambda m: seen.append(float(m)), None, mean)
        return sgd(state, batch), {}

    run(driver, steps=1)
    assert len(set(seen)) == 1


def test_scratch_memory_within_a_loop_is_no_effect():
    def driver(state, batch):
        def body(carry, y):
            ref = jax.new_ref(y)
            ref[...] = 2 * ref[...]
            return carry + ref[...], None

        total = jax.lax.scan(body, 0.0, batch["y"])[0]
        return sgd(state, batch), {"total": comm.all_reduce(total, op="sum")}

    plan = planned(driver, W)
    assert plan.prologues == {}
    assert plan.splittable


def test_the_host_is_asked_once_a_step_and_worker():
    asked = []

    def ask(_):
        asked.append(len(asked))
        return np.float32(len(asked))

    def driver(state, batch):
        own = jax.pure_callback(ask, ONE, state[0])
        return sgd(state, batch), {
            "called": comm.all_reduce(own + 0 * batch["y"].mean()),
            "gathered": comm.all_gather(own),
            "first": comm.broadcast(own),
        }

    for m in run(driver):
        assert m["first"] == m["gathered"][0]
        assert m["called"] == pytest.approx(m["gathered"].mean())
    assert len(asked) == 4


def test_a_callback_after_a_message_waits_for_it():
    def driver(state, batch):
        mean = comm.all_reduce(batch["y"].mean())
        doubled = ad.replicated(jax.pure_callback(lambda m: 2 * m, ONE, mean))
        gradient = jax.grad(lambda w: doubled * mean_loss(w, batch))(state)
        return state - 0.1 * comm.all_reduce(gradient), {"mean": mean, "doubled": doubled}

    plan = planned(driver, W)
    assert sorted(plan.prologues) == [1]
    for m in run(driver):
        assert m["doubled"] == pytest.approx(2 * m["mean"])
