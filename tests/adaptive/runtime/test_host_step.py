"""The host step: a schedule that is kept gives what a new one gives; a steady step makes few calls in Python."""

from __future__ import annotations

import sys
from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from adaptive.base.revision import Revision
from adaptive.runtime.host_step import HostStep
from adaptive.runtime.local_world import LocalWorld
from adaptive.runtime.segment import Feed
from tests.adaptive.drivers import HeldCompiler
from tests.relaxed import relaxed_tx

DATA = {
    "x": np.random.default_rng(0).normal(size=(128, 6)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=128).astype(np.float32),
}
ADAM = relaxed_tx(optax.adam(0.01))
LOCAL = {"seconds", "breakdown", "compute_seconds", "kernels", "compile_seconds", "waited_seconds"}  # of the machine


def begun():
    params = {"w": jnp.linspace(-1.0, 1.0, 6), "b": jnp.zeros(())}
    return {"params": params, "opt": ADAM.init(params), "unused": jnp.ones(3), "steps": jnp.zeros((), jnp.int32)}


def loss_of(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def plain(state, batch):
    loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
    return updated(state, comm.all_reduce(grads)), {"loss": comm.all_reduce(loss)}


def updated(state, grads, **more):
    updates, opt = ADAM.update(grads, state["opt"])
    params = optax.apply_updates(state["params"], updates)
    return {**state, "params": params, "opt": opt, "steps": state["steps"] + 1, **more}


def monitored(state, batch):
    loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
    mean = comm.all_reduce(grads)
    loss = comm.all_reduce(loss)
    smooth = mon.ema(loss, 0.9)
    ctrl.hook(grow, loss, comm.all_gather(mon.compute_seconds()), every=3)
    return updated(state, mean), {"smooth": smooth, "largest": comm.all_reduce(jnp.abs(batch["x"]).max(), op="max")}


def grow(control, loss, seconds):
    if control.step == 6:
        control.rescale(global_batch=24)


def averaged_now_and_then(state, batch):
    grads = jax.grad(loss_of)(state["params"], batch)
    return {**state, "local": comm.all_reduce(grads, when=ad.step_number() % 2 == 0)}, {}


def two_levels(state, batch):
    grads = comm.all_reduce(jax.grad(loss_of)(state["params"], batch))
    norm = optax.tree.norm(grads)
    return updated(state, grads), {"spread": comm.all_reduce(jnp.mean(batch["x"]) * norm)}


def spoilt(state, batch):
    """Not finite in some steps, which are skipped."""
    loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
    grads = jax.tree.map(lambda g: jnp.where(ad.step_number() % 4 == 2, jnp.nan, g), grads)
    return updated(state, comm.all_reduce(grads)), {"loss": comm.all_reduce(loss)}


def compared(state, batch):
    """A lone worker makes two calls of its batch, as a noise scale compares groups of examples."""
    loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
    mean = comm.all_reduce(grads)
    return updated(state, mean), {"noise": mon.noise_scale(grads, mean).scale, "loss": comm.all_reduce(loss)}


def trained(driver, steps=14):
    state, options = begun(), {"deterministic": True, "nonfinite": "skip", "resizable": driver is monitored}
    if driver is averaged_now_and_then:
        state["local"] = state["params"]
        options["per_worker_state"] = lambda state: state["local"]
    with ad.Program(driver, state, DATA, global_batch=16, **options) as program:
        reports = [program.step() for _ in range(steps)]
        return reports, program.state


def test_a_decision_without_effect_transfers_nothing(monkeypatch):
    measured = []
    measure = Feed.measure
    monkeypatch.setattr(Feed, "measure", lambda self, r, *n: measured.append(r.step) or measure(self, r, *n))

    def hooked(state, batch):
        state, metrics = plain(state, batch)
        ctrl.hook(lambda control, loss: None, metrics["loss"], every=5)
        return state, metrics

    with ad.Program(hooked, begun(), DATA, global_batch=16, resizable=False) as program:
        list(program.run(steps=4))
        before = len(measured)
        list(program.run(steps=40))
    assert len(measured) == before


@pytest.mark.parametrize("driver", [monitored, averaged_now_and_then, two_levels, spoilt, compared])
def test_a_schedule_that_is_kept_gives_what_one_built_for_each_step_gives(driver, monkeypatch):
    built = []
    build = HostStep._build
    monkeypatch.setattr(HostStep, "_build", lambda self, *args: built.append(1) or build(self, *args))
    kept = trained(driver)
    assert len(built) <= 4  # the sizes of `monitored` change
    monkeypatch.setattr(Revision, "number", property(lambda self: object(), lambda self, number: None), raising=False)
    built.clear()
    anew = trained(driver)
    assert len(built) == len(anew[0])
    for mine, other in zip(kept[0], anew[0], strict=True):
        assert vars(mine).keys() == vars(other).keys() == {field.name for field in fields(ad.Report)}
        for field in fields(mine):
            if field.name not in LOCAL:
                same(getattr(mine, field.name), getattr(other, field.name))
    same(kept[1], anew[1])
    assert driver is not spoilt or sum(report.skipped for report in kept[0]) == 3
    assert driver is not monitored or {report.global_batch for report in kept[0]} == {16, 24}
    assert driver is not compared or {report.microbatches for report in kept[0]} == {((8, 8),)}


def test_sizes_that_have_stayed_get_kernels_of_their_own(monkeypatch):
    monkeypatch.setattr("adaptive.runtime.host_step.OWN_KERNEL_AFTER", 3)

    def driver(state, batch):
        return state + comm.all_reduce(batch["y"].mean()), {}

    with ad.Program(driver, jnp.zeros(()), DATA, global_batch=4, world=LocalWorld(1)) as program:
        held = HeldCompiler(program._parts.engine.kernels)
        program.step()
        held.compile()
        program.rescale(global_batch=3)
        ran = [report.microbatches for report in program.run(steps=3)]
        assert held.asked == []
        ran += [report.microbatches for report in program.run(steps=2)]
        assert held.asked == [(0, 3)]
        held.compile()
        ran += [program.step().microbatches]
    assert ran == [((4,),), *[((2, 1),)] * 4, ((3,),)]


def same(mine, other):
    assert jax.tree.structure(mine) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True):
        if isinstance(a, str):
            assert a == b
        else:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def balanced(state, batch):
    """With a noise scale, and a policy that observes every step and decides in every tenth.

    The seconds are constant, those of a short step: how many calls `balance` makes depends on them.
    """
    loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
    mean = comm.all_reduce(grads)
    seconds = jnp.where(mon.compute_seconds() > 0, 1e-4, jnp.nan)
    ctrl.hook(ctrl.balance(), comm.all_gather(seconds), every=10)
    return updated(state, mean), {"noise": mon.noise_scale(grads, mean).scale, "loss": comm.all_reduce(loss)}


class Forgets:
    """A sink that writes nothing."""

    def write(self, event):
        pass

    def close(self):
        pass


def calls_of_a_step(driver, log=(), steps=40):
    """Calls in Python of one steady step. A count, which is the same however fast the machine is."""
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    # So many examples that no new epoch begins: computing its order takes some calls.
    data = {name: np.resize(leaf, (4096, *leaf.shape[1:])) for name, leaf in DATA.items()}
    with ad.Program(driver, begun(), data, global_batch=16, seed=0, resizable=False, deterministic=True) as program:
        run = program.run(steps=20 + steps, log=log)
        for _ in range(20):
            next(run)
        sys.setprofile(count)
        for _ in range(steps):
            next(run)
        sys.setprofile(None)
    return calls / steps


MOST_CALLS = {"bare": (plain, (), 40), "with a logger": (plain, (Forgets(),), 60), "with policies": (balanced, (), 80)}


@pytest.mark.parametrize("what", MOST_CALLS)
def test_a_steady_step_makes_few_calls_in_python(what):
    driver, log, most = MOST_CALLS[what]
    assert calls_of_a_step(driver, log) <= most
