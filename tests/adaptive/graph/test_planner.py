"""Traces of a driver at other times, in other threads and for other sizes are equal, or the difference raises."""

from __future__ import annotations

import contextvars
import threading
from contextlib import ExitStack

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from adaptive import operators
from adaptive.base.decision import Decision
from adaptive.graph.expressions import Expressions, sized
from adaptive.graph.planner import _another
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import FEATURES, make_data, mean_loss, planner, pointed_at, traced

W = jnp.zeros(FEATURES)
grad = jax.grad(mean_loss)


def sgd(state, batch):
    return state - 0.1 * comm.all_reduce(grad(state, batch)), {}


# --- what belongs to a size -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("examples", "multiple", "another"),
    [(8, 1, 4), (12, 1, 8), (2, 1, 3), (1, 1, 2), (32, 8, 16), (8, 8, 16), (96, 8, 64)],
)
def test_a_size_is_compared_with_the_power_of_two_below_it_and_never_with_one_unit(examples, multiple, another):
    assert _another(examples, multiple) == another


def numbers_of(driver, examples=8, other=4):
    """The numbers in a driver that are found to belong to its size: of literals, where they leave the graph."""
    ours, theirs = (Expressions(traced(driver, W, n)) for n in (examples, other))
    found = sized(ours, theirs)
    return sorted(np.asarray(v).item() for var, v in ours.graph.consts.items() if var in found)


def test_batch_size_literals_are_distinguished_from_constants():
    def driver(state, batch):
        return state, {"n": len(batch["y"]), "eight": 8, "half": len(batch["y"]) / 2, "four": 4.0}

    assert numbers_of(driver) == [4.0, 8]


def test_a_batch_size_literal_that_only_a_third_size_shows_is_found():
    def driver(state, batch):
        counted = comm.all_reduce(min(len(batch["y"]), 4) * ad.worker_index(), op="sum")
        return state - comm.all_reduce(grad(state, batch)), {"counted": counted}

    plans = planner(driver, W)
    plans.begin(8)
    with pytest.raises(ad.DriverError, match="is another program for 2 examples than for 8"):
        plans(2)


def test_slots_that_begin_with_a_number_of_the_shape_are_refused():
    def driver(state, batch):
        operators.operator_state("count", np.full(2, len(batch["y"]), np.float32), lambda old: (old, None))
        return sgd(state, batch)

    with pytest.raises(ad.DriverError, match="is another program"):
        planner(driver, W).begin(8)


def test_constants_of_nested_jaxprs_are_compared():
    table = {"now": np.arange(3.0, dtype=np.float32)}

    @jax.custom_jvp
    def shifted(x):
        return x + table["now"].sum() + jnp.asarray(table["now"])

    shifted.defjvp(lambda p, t: (shifted(*p), t[0]))
    one = Expressions(traced(lambda s, b: (shifted(s), {}), W))
    table["now"] = table["now"] + 1
    jax.clear_caches()
    other = Expressions(traced(lambda s, b: (shifted(s), {}), W))
    assert one.of(one.graph.new_state[0]) != other.of(other.graph.new_state[0])


# --- batches of one size ----------------------------------------------------------------------------------------------


def test_a_driver_that_is_written_for_one_size_runs_whole_batches_of_it():
    def driver(state, batch):
        return state - 0.1 * comm.all_reduce(grad(state, {k: v.reshape(6, *v.shape[1:]) for k, v in batch.items()})), {}

    (reason,) = planner(driver, W).begin(6).unsplittable
    assert reason.startswith("the driver cannot be traced for 4 examples (TypeError: cannot reshape")
    with ad.Program(driver, W, make_data(), global_batch=12, world=LocalWorld(2)) as program:
        program.warm_up()
        assert [program.step().batch_sizes for _ in range(3)] == [(6, 6)] * 3
        assert reason in program.explain()
        program.rescale(global_batch=8)
        with pytest.raises(ad.DriverError, match=r"cannot run on 4 examples \(TypeError: cannot reshape"):
            program.warm_up()


def test_rows_of_each_example_may_be_gathered_while_batches_are_of_one_size():
    def driver(state, batch):
        rows = comm.all_gather(batch["y"])
        return sgd(state, batch)[0], {"spread": rows.max() - rows.min()}

    with ad.Program(driver, W, make_data(), global_batch=12, world=LocalWorld(2)) as program:
        assert "batch sizes are fixed (all_gather (test_planner.py:" in program.explain()
        for request in ({"shares": [1, 2]}, {"global_batch": 24}):
            with pytest.raises(ad.BatchSizeError, match=r"all_gather \(test_planner.py:\d+\) sends a row for"):
                program.rescale(**request)
        program.step()
        assert program.check().verdict == "not known"
        assert "sends a row for each example" in program.check().note
    uneven = ad.Program(driver, W, make_data(), global_batch=11, world=LocalWorld(2))
    with pytest.raises(ad.DriverError, match="every worker's batch must have 6 examples"):
        uneven.step()


@pytest.mark.parametrize("by", ["a policy", "a function"])
def test_hooks_do_not_change_the_sizes_of_a_driver_that_gathers_rows(by):
    def driver(state, batch):
        seconds = comm.all_gather(1.0 + ad.worker_index().astype(jnp.float32))
        policy = ctrl.Policy(lambda n: (), lambda seen, state: (Decision(shares=(1.0, 3.0)), state), "uneven")
        ctrl.hook(policy if by == "a policy" else lambda control, _: control.rescale(shares=[1, 3]), seconds, every=2)
        return sgd(state, batch)[0], {"rows": comm.all_gather(batch["y"])}

    with ad.Program(driver, W, make_data(), global_batch=12, world=LocalWorld(2)) as program:
        if by == "a function":
            with pytest.raises(ad.BatchSizeError, match=r"\(3, 9\), .* fixed, \(6, 6\): all_gather"):
                list(program.run(steps=4))
            return
        first, *reports = program.run(steps=8)
        assert not any(r.decision for r in reports)
        assert any(
            "cannot change batch sizes or workers" in note and "test_planner.py:" in note for note in first.notes
        )
        assert {r.batch_sizes for r in reports} == {(6, 6)}


# --- time -------------------------------------------------------------------------------------------------------------


def test_a_global_that_changes_between_two_traces_is_found_with_its_line():
    rate = {"now": 0.1}

    def driver(state, batch):
        return state - comm.all_reduce(jax.grad(lambda w: rate["now"] * mean_loss(w, batch))(state)), {}

    plans = planner(driver, W)
    plans.begin(8)
    plans(3)
    rate["now"] = 0.2
    with pytest.raises(ad.DriverError, match="computes something else than when the program was built") as caught:
        plans(5)
    assert 'rate["now"]' in pointed_at(caught.value)[0]


def step_until_warm(program):
    while not program._parts.engine.kernels.warm:
        program.step()
    program.step()


def test_an_array_keeps_its_value_of_the_build():
    table = np.ones((64, FEATURES), np.float32)

    def driver(state, batch):
        return sgd(state, batch)[0], {
            "table": jnp.asarray(table)[0, 0],
            "call": comm.all_reduce(table.max() + 0 * batch["y"][0]),
        }

    with ad.Program(driver, W, make_data(), global_batch=12, world=LocalWorld(2)) as program:
        program.warm_up()
        table[:] = 5
        assert program.step().metrics == {"table": 1, "call": 1}
        program.rescale(global_batch=24)
        with pytest.raises(ad.DriverError, match="computes something else"):
            step_until_warm(program)


# --- surroundings -----------------------------------------------------------------------------------------------------

FACTOR = contextvars.ContextVar("FACTOR", default=1.0)


def in_another_thread(function):
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


def test_a_context_variable_keeps_its_value_of_the_build():
    def driver(state, batch):
        return state - FACTOR.get() * comm.all_reduce(grad(state, batch)), {"factor": FACTOR.get()}

    token = FACTOR.set(3.0)
    plans = planner(driver, W)
    plans.begin(8)
    FACTOR.reset(token)
    plan = in_another_thread(lambda: plans(3))
    assert plan.signature == plans.reference.signature


def test_matmul_precision_is_that_of_the_build():
    with jax.default_matmul_precision("highest"):
        plans = planner(sgd, W)
        plans.begin(8)
    plan = in_another_thread(lambda: plans(3))
    dots = [e for e in plan.graph.eqns if e.primitive.name == "dot_general"]
    assert dots
    assert all("HIGHEST" in str(e.params["precision"]) for e in dots)


def test_debug_settings_of_jax_do_not_change_a_program():
    def driver(state, batch):
        seconds = comm.all_gather(mon.compute_seconds())  # NaN in the first step
        return sgd(state, batch)[0], {"seconds": seconds}

    def build():
        return ad.Program(driver, W, make_data(), global_batch=12, world=LocalWorld(2))

    with ExitStack() as settings:
        settings.enter_context(jax.debug_nans(True))
        settings.enter_context(jax.transfer_guard("disallow"))
        settings.enter_context(jax.disable_jit())
        settings.enter_context(jax.set_mesh(jax.make_mesh((1,), ("x",))))
        settings.enter_context(jax.check_tracer_leaks())
        program = settings.enter_context(build())
        states = [program.step() and program.state, next(program.run(steps=1)) and program.state]
    with build() as program:
        assert [np.array_equal(s, program.step() and program.state) for s in states] == [True, True]
