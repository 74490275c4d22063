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

from .linear import FIRST, PARAMS, close, data, gradient, mean_loss, states, steps, vector

pytestmark = pytest.mark.usefixtures("double_precision")

SIZES = (4, 6, 2)
RATE = 0.05


def build(driver, state=PARAMS, *, per_worker_state=lambda s: s, shares=SIZES, **options):
    options = {"global_batch": 12, "world": LocalWorld(3), "per_worker_state": per_worker_state, **options}
    return ad.Program(driver, state, data(), shares=shares, **options)


def moved(params, grads):
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads)


def periodic(every):
    def driver(state, batch):
        loss, grads = jax.value_and_grad(mean_loss)(state, batch)
        new = moved(state, comm.local_mean(grads))
        return comm.all_reduce(new, when=ad.step_number() % every == every - 1), {"loss": comm.all_reduce(loss)}

    return driver


def test_local_steps_with_periodic_averages_are_those_of_a_plain_loop():
    program, vs, sent = build(periodic(3), microbatch=2), [FIRST] * 3, []
    program.subscribe(lambda event: sent.append(event.report.messages))
    for step, batches in enumerate(steps(program, 12)):
        vs = [v - RATE * gradient(v, b) for v, b in zip(vs, batches, strict=True)]
        averages = step % 3 == 2
        if averages:
            vs = [np.average(vs, axis=0, weights=SIZES)] * 3
        for v, state in zip(vs, states(program), strict=True):
            close(vector(state), v)
        assert sent[-1] == 1 + averages


def test_a_worker_without_examples_stays_where_it_is():
    program = build(periodic(1000), shares=(6, 6, 0))
    for _ in range(3):
        assert program.step().batch_sizes == (6, 6, 0)
    assert [np.array_equal(vector(state), FIRST) for state in states(program)] == [False, False, True]


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
        loss, grads = jax.value_and_grad(mean_loss)(state, batch)
        loss = comm.all_reduce(loss)
        ctrl.hook(stop_averaging, loss)
        return moved(state, comm.all_reduce(grads, when=averaging)), {"loss": loss}

    program = build(driver, resizable=False)
    reports = [program.step() for _ in range(8)]
    assert [r.messages for r in reports] == [2] * 4 + [1] * 4
    assert len({r.kernels for r in reports}) == 1
    first, second, _ = states(program)
    assert not np.array_equal(vector(first), vector(second))
    assert [r.hyperparameters["averaging"] for r in reports] == [True] * 4 + [False] * 4
    text = program.explain()
    assert "from each worker, 1 buffer, in steps in which its when= is true" in text


def test_a_gate_applies_to_replicated_values():
    def driver(state, batch):
        total = comm.all_reduce(state, op="sum", when=ad.step_number() % 2 == 0)
        return total, {"mean": comm.all_reduce(batch["x"].mean())}

    program, found = build(driver, jnp.ones(()), per_worker_state=None), []
    for _ in range(3):
        program.step()
        found.append(float(states(program)[1]))
    assert found == [3.0, 3.0, 9.0]


@pytest.mark.parametrize(
    ("gate", "error", "says"),
    [
        (lambda loss: loss > 1, ReplicationError, r"all_reduce\(when=\).*can differ between.*(?s:.*)hyperparameter"),
        (lambda loss: comm.all_reduce(loss) > 1, CollectiveError, "depends on messages of the same step"),
    ],
    ids=["local", "of the same step"],
)
def test_a_gate_that_is_not_known_before_the_step_is_refused(gate, error, says):
    def driver(state, batch):
        loss, grads = jax.value_and_grad(mean_loss)(state, batch)
        return moved(state, comm.all_reduce(grads, when=gate(loss))), {}

    with pytest.raises(error, match=says):
        build(driver)


def test_gates_that_are_no_truth_values_are_refused():
    with pytest.raises(CollectiveError, match=r"when= must be one boolean, but is int32\[\]"):
        comm.all_reduce(1.0, op="sum", when=np.int32(1))
    with pytest.raises(CollectiveError, match="neither true nor false"):
        comm.all_reduce(1.0, op="sum", when="yes")
    with pytest.raises(CollectiveError, match="whose mean would be rounded"):
        comm.local_mean(np.int32(1))


def test_truth_values_are_set_to_truth_values():
    def driver(state, batch):
        return jnp.where(ad.hyperparameter("on", True), state, 0), {"mean": comm.all_reduce(batch["x"].mean())}

    program = build(driver, jnp.ones(()), per_worker_state=None)
    program.set_hyperparameters(on=False)
    assert program.hyperparameters == {"on": False}
    with pytest.raises(DriverError, match=r"set_hyperparameters\(on=0.5\): on must be True or False"):
        program.set_hyperparameters(on=0.5)
