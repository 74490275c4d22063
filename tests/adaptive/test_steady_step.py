"""The common step and the general one: the same bits, the same decisions, the same reports."""

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
from adaptive.runtime.steady_step import SteadyStep
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


def updated(state, grads):
    updates, opt = ADAM.update(grads, state["opt"])
    params = optax.apply_updates(state["params"], updates)
    return {**state, "params": params, "opt": opt, "steps": state["steps"] + 1}


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
    return {**state, "local": comm.all_reduce(grads, when=ad.step() % 2 == 0)}, {}


def two_levels(state, batch):
    grads = comm.all_reduce(jax.grad(loss_of)(state["params"], batch))
    norm = optax.tree.norm(grads)
    return updated(state, grads), {"spread": comm.all_reduce(jnp.mean(batch["x"]) * norm)}


def spoilt(state, batch):
    """Not finite in some steps, which are skipped."""
    loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
    grads = jax.tree.map(lambda g: jnp.where(ad.step() % 4 == 2, jnp.nan, g), grads)
    return updated(state, comm.all_reduce(grads)), {"loss": comm.all_reduce(loss)}


def trained(driver, steps=14):
    state, options = begun(), {"deterministic": True, "nonfinite": "skip", "resizable": driver is monitored}
    if driver is averaged_now_and_then:
        state["local"] = state["params"]
        options["local"] = lambda state: state["local"]
    with ad.Program(driver, state, DATA, global_batch=16, **options) as program:
        reports = [program.step() for _ in range(steps)]
        return reports, program.state


@pytest.mark.parametrize("driver", [plain, monitored, averaged_now_and_then, two_levels, spoilt])
def test_both_give_the_same_states_reports_and_decisions(driver, monkeypatch):
    taken = []
    take = SteadyStep.__call__
    monkeypatch.setattr(SteadyStep, "__call__", lambda self, *args: taken.append(1) or take(self, *args))
    steady = trained(driver)
    assert bool(taken) == (driver in (plain, monitored, spoilt)), taken
    monkeypatch.setattr(SteadyStep, "fits", lambda self, microbatches: False)
    taken.clear()
    general = trained(driver)
    assert not taken
    for mine, other in zip(steady[0], general[0], strict=True):
        for field in fields(mine):
            if field.name not in LOCAL:
                same(getattr(mine, field.name), getattr(other, field.name))
    same(steady[1], general[1])
    assert driver is not spoilt or sum(report.skipped for report in steady[0]) == 3
    assert driver is not monitored or {report.global_batch for report in steady[0]} == {16, 24}


def same(mine, other):
    assert jax.tree.structure(mine) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True):
        if isinstance(a, str):
            assert a == b
        else:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_steady_step_makes_few_calls_in_python():
    """A count, which is the same however fast the machine is."""
    steps, calls = 50, 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    options = {"resizable": False, "deterministic": True}
    with ad.Program(plain, begun(), DATA, global_batch=16, **options) as program:
        run = program.run(steps=20 + steps)
        for _ in range(20):
            next(run)
        sys.setprofile(count)
        for _ in range(steps):
            next(run)
        sys.setprofile(None)
    assert calls / steps < MOST_CALLS


MOST_CALLS = 220
