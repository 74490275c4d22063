"""Values combined on one worker alone: `local_mean`, and collectives in steps in which they are not sent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from adaptive import CollectiveError, DriverError, ReplicationError
from adaptive.runtime.local_world import LocalWorld

pytestmark = pytest.mark.usefixtures("double_precision")

SIZES = (4, 6, 2)
RATE = 0.05


def data(examples=120):
    x = np.random.default_rng(0).normal(size=(examples, 4))
    return {"x": x, "y": x @ np.arange(4.0)}


def mean_loss(w, batch):
    return ((batch["x"] @ w - batch["y"]) ** 2).mean()


def by_hand(w, x, y):
    return w - RATE * 2 * (x @ w - y) @ x / len(y)


def build(driver, state=None, *, per_worker_state=lambda s: s["w"], shares=SIZES, **options):
    state = {"w": jnp.zeros(4)} if state is None else state
    return ad.Program(
        driver,
        state,
        data(),
        global_batch=12,
        world=LocalWorld(3),
        per_worker_state=per_worker_state,
        shares=shares,
        **options,
    )


def batches_of(program):
    """What each step's workers are given, read off the program's stream by another one that keeps them."""
    seen = []
    take = program._parts.stream.take

    def taken(*args, **options):
        share = take(*args, **options)
        seen.append([jax.tree.map(np.asarray, b) for b in share.batches])
        return share

    program._parts.stream.take = taken
    return seen


def periodic(every):
    def driver(state, batch):
        loss, grads = jax.value_and_grad(mean_loss)(state["w"], batch)
        w = state["w"] - RATE * comm.local_mean(grads)
        return {"w": comm.all_reduce(w, when=ad.step_number() % every == every - 1)}, {"loss": comm.all_reduce(loss)}

    return driver


def test_local_steps_with_periodic_averages_are_those_of_a_plain_loop():
    program = build(periodic(3), microbatch=2)
    seen = batches_of(program)
    ws = [np.zeros(4)] * 3
    for step in range(12):
        report = program.step()
        sizes = report.batch_sizes
        assert sizes == SIZES
        ws = [by_hand(w, b["x"], b["y"]) for w, b in zip(ws, seen[-1], strict=True)]
        averages = step % 3 == 2
        if averages:
            ws = [sum(n * w for n, w in zip(sizes, ws, strict=True)) / sum(sizes)] * 3
        for w, state in zip(ws, program._parts.engine.states, strict=True):
            np.testing.assert_allclose(state[0], w, rtol=1e-13, atol=1e-14)
        assert report.messages == 1 + averages


def test_a_worker_without_examples_stays_where_it_is():
    program = build(periodic(1000), shares=(6, 6, 0))
    for _ in range(3):
        assert program.step().batch_sizes == (6, 6, 0)
    assert program._parts.engine.states[1][0].any()
    assert not program._parts.engine.states[2][0].any()


def test_alone_and_outside_a_program_it_is_the_value():
    with comm.SoloWorld():
        np.testing.assert_array_equal(comm.local_mean({"a": np.arange(3.0)})["a"], np.arange(3.0))
        assert comm.all_reduce(2.0, op="sum", when=np.bool_(False)) == 2.0
    with comm.DeviceWorld(jax.local_devices()[:2]):
        assert comm.local_mean(2.0) == 2.0
        assert comm.all_reduce(2.0, op="sum", when=jnp.asarray(True)) == 4.0
        assert comm.all_reduce(2.0, op="sum", when=jnp.asarray(False)) == 2.0


def test_a_hook_switches_messages_of_the_next_step_without_a_compilation():
    def stop_averaging(control, loss):
        if control.step == 4:
            control.set_hyperparameters(averaging=False)

    def driver(state, batch):
        averaging = ad.hyperparameter("averaging", True)
        loss, grads = jax.value_and_grad(mean_loss)(state["w"], batch)
        grads = comm.all_reduce(grads, when=averaging)
        loss = comm.all_reduce(loss)
        ctrl.hook(stop_averaging, loss)
        return {"w": state["w"] - RATE * grads}, {"loss": loss}

    program = build(driver, resizable=False)
    reports = [program.step() for _ in range(8)]
    assert [r.messages for r in reports] == [2] * 4 + [1] * 4
    assert len({r.kernels for r in reports}) == 1
    states = [np.asarray(s[0]) for s in program._parts.engine.states]
    assert not np.array_equal(states[0], states[1])
    assert [r.hyperparameters["averaging"] for r in reports] == [True] * 4 + [False] * 4
    text = program.explain()
    assert "from each worker, 1 buffer, in steps in which its when= is true" in text


def test_a_gate_applies_to_replicated_values():
    def driver(state, batch):
        total = comm.all_reduce(state["w"], op="sum", when=ad.step_number() % 2 == 0)
        return {"w": total}, {"loss": comm.all_reduce(mean_loss(state["w"], batch))}

    program = build(driver, {"w": jnp.ones(4)}, per_worker_state=None)
    found = []
    for _ in range(3):
        program.step()
        found.append(float(program._parts.engine.states[1][0][0]))
    assert found == [3.0, 3.0, 9.0]


def test_a_gate_that_workers_could_see_differently_is_refused():
    def driver(state, batch):
        loss, grads = jax.value_and_grad(mean_loss)(state["w"], batch)
        return {"w": state["w"] - comm.all_reduce(grads, when=loss > 1)}, {}

    with pytest.raises(
        ReplicationError, match=r"all_reduce\(when=\).*can differ between workers.*(?s:.*)hyperparameter"
    ):
        build(driver)


def test_a_gate_that_follows_from_the_same_step_is_refused():
    def driver(state, batch):
        loss, grads = jax.value_and_grad(mean_loss)(state["w"], batch)
        return {"w": state["w"] - comm.all_reduce(grads, when=comm.all_reduce(loss) > 1)}, {}

    with pytest.raises(CollectiveError, match="depends on messages of the same step"):
        build(driver)


def test_gates_that_are_no_truth_values_are_refused():
    with pytest.raises(CollectiveError, match=r"when= must be one boolean, but is int32\[\]"):
        comm.all_reduce(1.0, op="sum", when=np.int32(1))
    with pytest.raises(CollectiveError, match="neither true nor false"):
        comm.all_reduce(1.0, op="sum", when="yes")
    with pytest.raises(CollectiveError, match="whose mean would be rounded"):
        comm.local_mean(np.int32(1))


def test_local_values_are_refused_in_the_state():
    def driver(state, batch):
        grads = jax.grad(mean_loss)(state["w"], batch)
        return {"w": state["w"] - comm.local_mean(grads)}, {}

    with pytest.raises(ReplicationError, match="local_mean, whose result differs between workers"):
        build(driver, per_worker_state=None)


def test_truth_values_are_set_to_truth_values():
    def driver(state, batch):
        on = ad.hyperparameter("on", True)
        return {"w": jnp.where(on, state["w"], 0)}, {"loss": comm.all_reduce(mean_loss(state["w"], batch))}

    program = build(driver, per_worker_state=None)
    program.set_hyperparameters(on=False)
    assert program.hyperparameters == {"on": False}
    with pytest.raises(DriverError, match=r"set_hyperparameters\(on=0.5\): on must be True or False"):
        program.set_hyperparameters(on=0.5)
