"""An update that makes NaNs of finite values raises; values of the state that may be NaN do not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from adaptive.base.worker_slots import WorkerSlots
from adaptive.runtime.local_world import LocalWorld
from adaptive.runtime.message import accumulate
from tests.adaptive.drivers import two_statuses
from tests.relaxed import relaxed_tx

X = np.arange(1.0, 25, dtype=np.float32)
NAN = float("nan")


def build(driver, state, *, workers=2, **options):
    world = options.pop("world", None) or LocalWorld(workers)
    return ad.Program(driver, state, {"x": X}, global_batch=12, world=world, resizable=False, **options)


def rooted(state, batch):
    """An optimizer whose second moment sinks below zero in the second step."""
    mean = comm.all_reduce((1 + 0 * batch["x"]).mean())
    moment = state["moment"] - mean
    return {"w": state["w"] - mean / jnp.sqrt(moment), "moment": moment}, {"mean": mean}


START = {"w": np.float32(0), "moment": np.float32(1.5)}
MADE_NANS = r"the update of step 2 made NaNs: in state\['w'\] \(test_nan_updates.py:\d+\). The values from"


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_the_next_step_raises_and_does_not_run(nonfinite):
    with build(rooted, START, nonfinite=nonfinite) as program:
        program.step()
        assert not program.step().skipped
        for _ in range(2):  # as often as it is tried
            with pytest.raises(ad.NonFiniteError, match=MADE_NANS) as error:
                program.step()
        assert "The state is that of step 2, with these NaNs" in str(error.value)
        assert "program.restore(checkpoint)" in str(error.value)
        assert program.steps == 2
        state = program.state  # the error was raised, so the state can be read
        assert np.isnan(state["w"])
        assert state["moment"] == -0.5


def test_the_first_update_is_looked_at_too():
    with build(rooted, START | {"moment": np.float32(0.5)}) as program:
        program.step()
        with pytest.raises(ad.NonFiniteError, match=MADE_NANS.replace("step 2", "step 1")):
            program.step()


@pytest.mark.parametrize(
    "ask",
    [
        lambda p: p.state,
        lambda p: p.checkpoint(),
        lambda p: p.evaluate(lambda s, b: s["w"] * b["x"].mean(), {"x": X}),
        lambda p: list(p.run(steps=0)),
    ],
)
def test_reading_the_state_raises_at_once(ask):
    with build(rooted, START) as program:
        program.step()
        ask(program)
        program.step()
        with pytest.raises(ad.NonFiniteError, match=MADE_NANS):
            ask(program)


def test_a_run_does_not_end_well_with_nans():
    with build(rooted, START) as program:
        reports = []
        with pytest.raises(ad.NonFiniteError, match=MADE_NANS):
            reports.extend(program.run(steps=2))
        assert program.steps == 2


def test_a_checkpoint_is_the_way_back():
    with build(rooted, START) as program:
        program.step()
        kept = program.checkpoint()
        program.step()
        with pytest.raises(ad.NonFiniteError):
            program.step()
        program.restore({**kept, "state": {"w": np.float32(1), "moment": np.float32(9.0)}})
        assert not program.step().skipped
        assert np.isfinite(program.state["w"])


def test_with_nonfinite_allow_nothing_raises():
    with build(rooted, START, nonfinite="allow") as program:
        assert len(list(program.run(steps=3))) == 3
        assert np.isnan(program.state["w"])
        assert program._parts.engine.workers.update_nans is None
        assert program._parts.engine.step_plan.finite_checks == []


# --- what may be NaN --------------------------------------------------------------------------------------------------


def runs(driver, state, steps=4, **options):
    with build(driver, state, **options) as program:
        assert len(list(program.run(steps=steps))) == steps
        return program.state


def test_nans_that_were_there_before_and_infinities_may_stay():
    def driver(state, batch):
        mean = comm.all_reduce(batch["x"].mean())
        both = mean * jnp.array([jnp.inf, -jnp.inf])  # the sum of these is NaN, but none of them is
        new = {"kept": state["kept"] + mean, "of kept": state["kept"].sum(), "infinite": both}
        return new, {"mean": mean}

    kept = np.array([1.0, NAN], np.float32)
    state = runs(driver, {"kept": kept, "of kept": 0.0, "infinite": np.zeros(2, np.float32)})
    assert np.isnan(state["of kept"])
    assert np.isinf(state["infinite"]).all()


def test_a_leaf_that_was_nan_and_got_over_it_has_to_stay_finite():
    def driver(state, batch):
        mean = comm.all_reduce((1 + 0 * batch["x"]).mean())
        return {"root": jnp.sqrt(jnp.sin(1.0 * state["count"])), "count": state["count"] + mean}, {}

    with build(driver, {"root": NAN, "count": 0.0}) as program:
        reports = []
        with pytest.raises(ad.NonFiniteError, match="the update of step 5 made NaNs"):  # sin(4) < 0
            reports.extend(program.run(steps=6))


def test_values_that_may_be_nan_may_enter_the_state():
    """Seconds are not known in the first step: gathered, measured, or averaged in a slot."""

    def driver(state, batch):
        seconds = comm.all_gather(mon.compute_seconds())
        mean = comm.all_reduce(batch["x"].mean())
        average = mon.ema(seconds)
        ctrl.hook(lambda control, s: None, average)
        return {"w": state["w"] - mean, "seconds": seconds, "twice": 2 * average, "slow": seconds.max()}, {}

    start = {"w": 0.0, "seconds": np.zeros(2, np.float32), "twice": np.zeros(2, np.float32), "slow": 0.0}
    assert np.isfinite(runs(driver, start)["w"])
    with build(driver, start) as program:
        program.step()
        assert np.isnan(program.state["seconds"]).all()


def test_values_computed_from_a_nan_are_checked_once_it_is_finite():
    def driver(state, batch):
        seconds = comm.all_gather(mon.compute_seconds()).sum()
        mean = comm.all_reduce(batch["x"].mean())
        return {"w": mean * seconds + jnp.log(2.5 - state["count"]), "count": state["count"] + 1}, {}

    with build(driver, {"w": 0.0, "count": 0.0}) as program:
        program._parts.engine.kernels.few_cores = False  # else seconds may stay unknown while kernels are compiled
        with pytest.raises(ad.NonFiniteError, match=r"the update of step 4 made NaNs: in state\['w'\]"):
            list(program.run(steps=6))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64"])
def test_leaves_of_other_types_are_looked_at(dtype):
    def driver(state, batch):
        mean = comm.all_reduce((1 + 0 * batch["x"]).mean())
        return {"w": (state["w"] * 0 * mean.astype(dtype)) / state["n"], "n": state["n"] - 1}, {}

    program = build(driver, {"w": jnp.ones(3, dtype), "n": jnp.ones((), dtype)})  # 0 / 0 in the second step
    with program, pytest.raises(ad.NonFiniteError, match=r"the update of step 2 made NaNs: in state\['w'\]"):
        list(program.run(steps=6))


def test_integers_and_keys_in_the_state_are_no_hindrance():
    def driver(state, batch):
        mean = comm.all_reduce(batch["x"].mean())
        return {"key": jax.random.split(state["key"], 1)[0], "n": state["n"] + 1, "w": state["w"] - mean}, {}

    assert int(runs(driver, {"key": jax.random.key(0), "n": 0, "w": 0.0})["n"]) == 4


# --- state that is local on purpose -----------------------------------------------------------------------------------


def own_root(state, batch):
    own = state["own"] - 1.0
    root = jnp.sqrt(jnp.where(ad.worker_index() == 1, own, 1.0))
    return {"own": own, "root": root, "w": state["w"] + comm.all_reduce(batch["x"].mean())}, {}


LOCAL = {"own": np.float32(2.5), "root": np.float32(0), "w": np.float32(0)}


def local(state):
    return state["own"], state["root"]


def test_local_state_of_any_worker_here_is_looked_at():
    with build(own_root, LOCAL, per_worker_state=local) as program:
        message = r"the update of step 3 made NaNs on worker 1: in state\['root'\] \(test_nan_updates.py:\d+\)"
        with pytest.raises(ad.NonFiniteError, match=message):
            list(program.run(steps=6))


class Twin(LocalWorld):
    """One worker of two processes; the other one does the same."""

    processes = 2

    def __init__(self, number):
        super().__init__(1)
        WorkerSlots.__init__(self, 2)
        self.rank, self.workers = number, range(number, number + 1)
        self.statuses, self.heard = [], []

    def exchange(self, parts, ops, status, channel=0, about="", more="", step=0):
        self.statuses.append(status.tolist())
        return [accumulate(ops, parts[0], parts[0])], two_statuses(status)

    def all_gather_bytes(self, value, about=""):
        return [value, value]

    def fail(self, why):
        self.heard.append(why)


def test_nans_in_local_state_are_reported_to_all_in_the_next_message():
    world = Twin(1)
    with build(own_root, LOCAL, per_worker_state=local, world=world) as program:
        [program.step() for _ in range(3)]
        assert len(world.statuses) == 3
        with pytest.raises(ad.NonFiniteError, match="the update of step 3 made NaNs on worker 1"):
            program.step()
        assert len(world.statuses) == 3
        assert len(world.heard) == 1
        assert "in step 4 of program 1 ('own_root'): NonFiniteError" in world.heard[0]


def test_of_replicated_state_every_process_finds_the_same_by_itself():
    world = Twin(0)
    with build(rooted, START, world=world) as program:
        [program.step() for _ in range(2)]
        with pytest.raises(ad.NonFiniteError, match=MADE_NANS):
            program.step()
        assert len(world.statuses) == 2
        assert world.heard == []  # all processes raise by themselves


def test_all_processes_hear_together_of_local_state_that_one_of_them_asks_for():
    class Odd(Twin):
        def all_gather_bytes(self, value, about=""):
            return [value, b"[[1, [0]]]"] if value == b"[]" and self.statuses else [value, value]

    world = Odd(0)
    with build(own_root, LOCAL, per_worker_state=local, world=world) as program:
        program.step()
        with pytest.raises(ad.NonFiniteError, match="the update of step 1 made NaNs on worker 1"):
            program.checkpoint()


def test_the_flags_cost_the_state_no_copy():
    optimizer = relaxed_tx(optax.adam(1e-3))

    def driver(state, batch):
        params, opt_state = state
        grads = comm.all_reduce(jax.grad(lambda p: ((batch["x"].sum() * p) ** 2).mean())(params))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {}

    params = jnp.zeros((30, 20))
    with build(driver, (params, optimizer.init(params))) as program:
        program.step()
        final = program._parts.engine.context.programs["final", 0, 0]
    assert final.memory_analysis().temp_size_in_bytes < params.nbytes


def test_averages_are_looked_at_in_the_parameters_that_they_make():
    tx = relaxed_tx(optax.adam(0.1))
    params = {"w": np.ones((3, 2), np.float32), "b": np.zeros(2, np.float32)}

    def driver(state, batch):
        params, opt = state["params"], state["opt"]
        grads = jax.tree.map(lambda p: comm.all_reduce(p * batch["x"].mean()), params)
        updates, opt = tx.update(grads, opt)
        longest = jnp.maximum(state["longest"], jnp.abs(opt[0].mu["b"]))  # whose NaNs are no other leaf's
        return {"params": optax.apply_updates(params, updates), "opt": opt, "longest": longest}, {}

    start = {"params": params, "opt": tx.init(params), "longest": np.zeros(2, np.float32)}
    with build(driver, start) as program:
        update_nans, names = program._parts.engine.workers.update_nans, program._parts.plan.graph.state_names
        shown = {
            names[i]: names[update_nans.leaves[n]]
            for i, n in zip(update_nans.leaves, update_nans._shown_by, strict=True)
        }
    for average in ("mu", "nu"):
        for leaf in ("w", "b"):
            (name,) = (name for name in shown if f".{average}" in name and f"['{leaf}']" in name)
            assert shown.pop(name) == f"state['params']['{leaf}']"
    assert shown == {name: name for name in shown}
    assert len(shown) == 3
