"""A driver becomes one flat graph, whatever it is written with; what cannot be in it is refused with the line."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive import operators
from adaptive.operators.collectives import collective_p
from adaptive.operators.hooks import hook_p
from adaptive.operators.operator_state import state_write_p
from adaptive.operators.sources import Source, read, source_p
from tests.adaptive.drivers import FEATURES, Recorder, mean_loss, pointed_at, traced

W = jnp.zeros(FEATURES)


def equations(graph, primitive):
    return [e for e in graph.eqns if e.primitive is primitive]


def sgd(state, batch):
    loss, grads = jax.value_and_grad(mean_loss)(state, batch)
    return state - 0.1 * comm.all_reduce(grads), {"loss": comm.all_reduce(loss)}


# --- one flat list of equations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda f: jax.jit(jax.jit(f)), functools.partial])
def test_a_driver_may_be_jitted_or_partial(wrap):
    graph = traced(wrap(sgd), W)
    assert len(equations(graph, collective_p)) == 2
    assert not [e for e in graph.eqns if e.primitive.name in ("jit", "pjit")]


@jax.jit
def mean_over_workers(x):  # of the module, so JAX keeps its trace from one driver to the next
    return comm.all_reduce(x)


def test_a_jitted_helper_called_twice_reduces_twice():
    def driver(state, batch):
        return state + mean_over_workers(batch["x"].mean()) + mean_over_workers(batch["y"].mean()), {}

    for _ in range(2):
        first, second = equations(traced(driver, 0.0), collective_p)
        assert first.invars[0] is not second.invars[0]
        assert first.outvars[0] is not second.outvars[0]


@jax.jit
def rows_of_workers(x):
    return comm.all_gather(x) / ad.capacity()


@jax.jit
def random_numbers(seed):
    return jax.vmap(jax.random.uniform)(ad.example_keys()) + seed


def test_jax_does_not_mistake_the_trace_of_a_helper_for_that_of_other_workers():
    def driver(state, batch):
        return state + rows_of_workers(batch["y"].mean()).sum(), {}

    for workers in (3, 5, 3):
        (gather,) = equations(traced(driver, 0.0, workers=workers), collective_p)
        assert gather.outvars[0].aval.shape == (workers,)


def test_jax_does_not_mistake_the_trace_of_a_helper_for_that_of_another_size():
    def driver(state, batch):
        return state + comm.all_reduce((batch["y"] * random_numbers(state)).mean()), {}

    for examples in (6, 1, 4):  # random_numbers(state) is called with the same shapes each time
        assert traced(driver, 0.0, examples).examples == examples


def test_an_array_that_is_closed_over_is_a_constant_and_the_same_one_once():
    table, other = jnp.arange(3.0), np.arange(3.0, dtype=np.float32)

    def driver(state, batch):
        scaled = jax.jit(lambda x: x * table)(batch["x"].mean(0))
        return state + comm.all_reduce(scaled * table + other), {}

    graph = traced(driver, W)
    values = [np.asarray(v) for v in graph.consts.values()]
    assert len(values) == 2
    assert all(np.array_equal(v, [0, 1, 2]) for v in values)
    produced = {v for e in graph.eqns for v in e.outvars} | set(graph.invars)
    assert not produced & set(graph.consts)


# --- sources ----------------------------------------------------------------------------------------------------------


def test_a_source_that_is_read_twice_is_one_value():
    def driver(state, batch):
        helper = jax.jit(lambda x: x * ad.batch_size().astype(float))
        twice = 0 * ad.step_number() + 0 * ad.step_number()
        return state + comm.all_reduce(helper(batch["y"].mean()) + helper(1.0)) + twice.astype(float), {}

    names = [e.params["source"].name for e in equations(traced(driver, 0.0), source_p)]
    assert sorted(names) == ["batch_size", "examples", "step"]


def test_different_sources_of_one_name_are_refused():
    load, other = Source("load", lambda r: 0.0), Source("load", lambda r: 0, np.int32)

    def driver(state, batch):
        return state, {"a": comm.all_reduce(read(load)), "b": comm.all_reduce(read(other), op="max")}

    with pytest.raises(ad.CollectiveError, match="two different sources are named 'load'") as error:
        traced(driver, 0.0)
    assert "read(other)" in pointed_at(error.value)[0]


# --- operators where they cannot be -----------------------------------------------------------------------------------


def in_scan(f, x):
    return jax.lax.scan(lambda c, row: (c + f(row), None), 0.0, x)[0]


def in_cond(f, x):
    return jax.lax.cond(x.sum() > 0, lambda: f(x[0]), lambda: 0.0)


def in_a_jit_in_a_scan(f, x):
    return in_scan(jax.jit(lambda row: f(row) * 2), x)


NESTS = {
    in_scan: "scan",
    in_cond: "cond",
    in_a_jit_in_a_scan: "scan",
}


@pytest.mark.parametrize(("nest", "name"), NESTS.items(), ids=lambda p: getattr(p, "__name__", p))
def test_a_collective_inside_control_flow_is_refused_with_its_line(nest, name):
    def driver(state, batch):
        return state + nest(lambda row: comm.all_reduce(row.sum()), batch["x"]), {}

    with pytest.raises(ad.CollectiveError, match=r"all_reduce\(op='mean'\)") as error:
        traced(driver, 0.0)
    assert name in str(error.value)
    assert pointed_at(error.value) == ['return state + nest(lambda row: comm.all_reduce(row.sum()), batch["x"]), {}']


def counted(row):
    return operators.operator_state("count", np.zeros(()), lambda n: (n + 1, n))


def handed_over(row):
    operators.hook("watch", Recorder(), (row.sum() * 0,))
    return 0.0


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        (lambda row: ad.step_number().astype(float), "source 'step'"),
        (counted, "operator state 'count'"),
        (handed_over, "hook 'watch'"),
        (lambda row: comm.all_gather(row).sum(), "all_gather"),
    ],
    ids=["source", "slot", "hook", "all_gather"],
)
def test_any_operator_in_a_loop_is_refused_by_its_name(operator, name):
    with pytest.raises(ad.CollectiveError, match=f"^{name} .*is inside jax.lax.scan") as error:
        traced(lambda s, b: (s + in_scan(operator, b["x"]), {}), 0.0)
    assert pointed_at(error.value)


def test_a_collective_in_a_function_with_rules_of_its_own_is_inlined():
    @jax.custom_vjp
    def f(x):
        return comm.all_reduce(x)

    f.defvjp(lambda x: (comm.all_reduce(x), None), lambda _, g: (g,))
    assert len(equations(traced(lambda s, b: (s + f(b["y"].mean()), {}), 0.0), collective_p)) == 1

    def differentiated(state, batch):
        return state + comm.all_reduce(jax.grad(lambda w: f(w * batch["y"].mean()))(state)), {}

    assert len(equations(traced(differentiated, 0.0), collective_p)) == 2


def test_a_mutable_array_is_refused_with_its_line():
    def driver(state, batch):
        ref = jax.new_ref(state)
        return state + ref[...], {}

    with pytest.raises(ad.CollectiveError, match=r"a mutable array \(jax.new_ref\)") as error:
        traced(driver, W)
    assert pointed_at(error.value) == ["ref = jax.new_ref(state)"]


# --- operators that JAX would leave out -------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
@pytest.mark.parametrize("operator", [counted, handed_over], ids=["slot", "hook"])
def test_an_operator_that_would_be_lost_in_a_derivative_is_missed(wrap, operator):
    def loss(w, batch):
        operator(w)
        return mean_loss(w, batch)

    def driver(state, batch):
        return state - comm.all_reduce(jax.grad(wrap(loss))(state, batch)), {}

    for _ in range(2):  # JAX's cache must not hide it the second time
        with pytest.raises(ad.CollectiveError, match=r"'(count|watch)' .*is lost") as error:
            traced(driver, W)
        assert "operators." in pointed_at(error.value)[0]


def test_operators_in_a_plain_function_that_is_differentiated_stay():
    def loss(w, batch):
        handed_over(w)
        return mean_loss(w, batch) + jax.lax.stop_gradient(counted(w))

    def driver(state, batch):
        return state - comm.all_reduce(jax.grad(loss)(state, batch)), {}

    graph = traced(driver, W)
    assert len(equations(graph, hook_p)) == len(equations(graph, state_write_p)) == 1


# --- what a driver returns --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "described"),
    [
        (lambda s: s, "a ShapeDtypeStruct"),
        (lambda s: (s, {}, {}), "a tuple of 3"),
        (lambda s: None, "a NoneType"),
    ],
)
def test_a_driver_that_returns_no_pair_is_refused(returned, described):
    with pytest.raises(ad.DriverError, match=rf"must return \(state, metrics\), a pair; it returned {described}"):
        traced(lambda s, b: returned(s), W)


def test_a_changed_structure_names_the_leaves():
    with pytest.raises(ad.DriverError) as error:
        traced(lambda s, b: ({"params": s["params"], "extra": s["old"]}, {}), {"params": W, "old": W})
    assert "without state['old']; with state['extra']" in str(error.value)


def test_a_changed_dtype_names_the_leaf_and_says_what_to_write():
    with pytest.raises(ad.DriverError) as error:
        traced(lambda s, b: ({"n": s["n"] + 1, "w": s["w"].astype(jnp.bfloat16)}, {}), {"n": 0, "w": W})
    assert "changes state['w'] from float32[3] to bfloat16[3]" in str(error.value)
    assert ".astype(float32)" in str(error.value)
