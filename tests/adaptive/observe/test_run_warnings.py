"""Each problem of a run is warned of once, with its remedy."""

from __future__ import annotations

import logging
from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from adaptive.base.activity import Breakdown
from adaptive.observe import run_warnings as _run_warnings
from adaptive.observe.run_warnings import STEPS, RunWarnings, value_names
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import event, make_data


def driver(state, batch):
    mean = comm.all_reduce(batch["y"].mean())
    noise = mon.NoiseScale(mean, mean, mean, mean, mean)
    ctrl.hook(ctrl.balance(), comm.all_gather(mon.compute_seconds()), every=10)
    ctrl.hook(ctrl.Policy(lambda n: (), lambda o, s: (None, s), "mine"), noise, {"a": mean}, every=7)
    ctrl.hook(lambda control, x: None, mean, name="function")
    return state + mean, {}


@pytest.fixture(scope="module")
def program():
    with ad.Program(driver, 0.0, make_data(24), global_batch=4, world=LocalWorld(2), resizable=False) as program:
        yield program


class Seen:
    """What hooks have never known."""

    def __init__(self, *values, steps=STEPS):
        self.unknown = [type("_", (), {"values": dict.fromkeys(v, ()), "steps": steps}) for v in values]


NONE = Seen((), (), ())


def said(
    caplog,
    program,
    hooks=NONE,
    steps=2 * STEPS,
    beside_compiler=0,
    input_=(0.0, 0.0),
    waited=(),
    deterministic=False,
    reads=True,
):
    """Return the log of so many steps of half a second each."""
    inputs = partial(np.sum, axis=0) if reads else None
    advice = RunWarnings(program._parts.plan, hooks, inputs, deterministic=deterministic)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "adaptive"):
        advice.begin()
        for step in range(1, steps + 1):
            at = dict(waited).get(step, max((s for since, s in waited if since <= step), default=1.0))
            advice.take(event(step, waited_seconds=at).report, np.array(input_), beside_compiler)
    return [record.message for record in caplog.records]


def test_all_is_well(caplog, program):
    assert said(caplog, program, input_=(0.0, 0.09)) == []


def test_waiting_for_input_is_warned_of_once_with_the_workers(caplog, program):
    (line,) = said(caplog, program, input_=(0.01, 0.2))
    assert line.startswith("worker 1 has waited for input in 40% of the last 50 steps' time (200.0 ms of 500.0 ms")
    assert "num_threads=" in line
    assert "num_readers=" in line
    assert "docs/input.md" in line
    assert said(caplog, program, input_=(0.01, 0.2), reads=False) == []  # of arrays in memory


def input_warnings(caplog, *halves, messages=1):
    """Return the log of fifty steps of half a second for each of these seconds of input of two workers."""
    plan = SimpleNamespace(messages=messages, hooks=(), unsplittable=())
    warnings = RunWarnings(plan, Seen(), partial(np.sum, axis=0), deterministic=False)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "adaptive"):
        warnings.begin()
        for step in range(STEPS * len(halves)):
            input_ = halves[step // STEPS]
            own = Breakdown(input_[0], 0, 0, 0, 0, 0, 0)
            warnings.take(event(step + 1, breakdown=own).report, np.array(input_), 0)
    return [record.message for record in caplog.records]


def test_input_is_judged_over_fifty_steps_at_a_time(caplog):
    """Without messages, by the input of this process."""
    (line,) = input_warnings(caplog, (0.0, 0.0), (0.11, 0.05))
    assert line.startswith(
        "worker 0 has waited for input in 22% of the last 50 steps' time (110.0 ms of 500.0 ms a step)"
    )
    assert input_warnings(caplog, (0.09, 0.09), (0.09, 0.09), (0.09, 0.09)) == []
    assert input_warnings(caplog, (0.09, 0.3), (0.09, 0.3), messages=0) == []
    assert input_warnings(caplog, (0.11, 0.0), messages=0)[0].startswith("worker 0 has waited for input in 22%")


def test_waits_for_the_compiler_are_counted_from_the_first_step_of_each_run(caplog):
    plan = SimpleNamespace(messages=1, hooks=(), unsplittable=["a sort"])
    warnings = RunWarnings(plan, Seen(), None, deterministic=True)

    def take(step, waited):
        warnings.take(event(step, waited_seconds=waited).report, np.zeros(2), 0)
        return [record.message for record in caplog.records]

    with caplog.at_level(logging.WARNING, "adaptive"):
        warnings.begin()
        assert (take(1, 7.0), take(2, 7.09)) == ([], [])
        warnings.begin()
        assert (take(3, 9.0), take(4, 9.09)) == ([], [])
        (line,) = take(5, 9.25)
        assert take(6, 99.0) == [line]
    assert line.startswith(
        "up to step 5 steps have waited 0.2 s for a compiler. A batch of this driver is one microbatch (a"
    )


def test_a_policy_that_knows_nothing_beside_a_compiler(caplog, program):
    (line,) = said(caplog, program, Seen([0], (), ()), beside_compiler=STEPS)
    assert line.startswith("'balance' (test_run_warnings.py:")
    assert "has no measurements yet: seconds had no known value in any of 50 steps, because kernels were" in line
    assert "program.warm_up()" in line


def test_a_policy_that_has_no_noise_scale(caplog, program):
    (line,) = said(caplog, program, Seen((), [0], ()))
    assert "'mine' (test_run_warnings.py:" in line
    assert "fewer than two in a step" in line


def test_a_policy_that_is_given_nothing_but_nans(caplog, program):
    (line,) = said(caplog, program, Seen((), [1], ()))
    assert "value_1 had no known value in any of 50 steps, where it was NaN" in line
    assert said(caplog, program, Seen((), [1], (), steps=STEPS - 1)) == []


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"deterministic": True}, "Deterministic programs wait for the kernels of a new size"),
        ({}, "They needed kernels that were not compiled yet"),
    ],
)
def test_steps_that_wait_for_a_compiler(caplog, program, options, advice):
    assert said(caplog, program, waited=[(1, 7.0)]) == []  # all of it at the start
    (line,) = said(caplog, program, waited=[(1, 7.0), (5, 7.4), (9, 8.0)], **options)
    assert line.startswith("up to step 5 steps have waited 0.4 s for a compiler. ")
    assert advice in line
    assert ("Deterministic" in line) == ("deterministic" in options)


def test_values_have_the_policys_names(program):
    assert [value_names(plan) for plan in program._parts.plan.hooks] == [["seconds"], ["value_0", "value_1"], ["x"]]


def test_a_run_warns_of_missing_values(caplog, monkeypatch):
    """From the values of hooks to one line in the log, on rank 0 alone."""
    monkeypatch.setattr(_run_warnings, "STEPS", 6)

    def blind(state, batch):
        mean = comm.all_reduce(batch["y"].mean())
        seconds = comm.all_gather(mon.compute_seconds())
        ctrl.hook(ctrl.balance(), seconds + jnp.nan, every=2)
        ctrl.hook(ctrl.balance(), jnp.where(ad.step_number() < 4, jnp.nan, 1 + 0 * seconds), every=3)
        ctrl.hook(lambda control, x: None, mean * jnp.nan, name="function")
        return state + mean, {}

    with caplog.at_level(logging.WARNING, "adaptive"):
        for rank in (0, 1):
            world = LocalWorld(2)
            world.rank = rank
            with ad.Program(blind, 0.0, make_data(24), global_batch=4, world=world, resizable=False) as program:
                list(program.run(steps=13))
    assert [record.message.partition(":")[0] for record in caplog.records] == ["'balance' (test_run_warnings.py"]
