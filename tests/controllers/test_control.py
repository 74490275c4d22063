"""Requests of a hook: accepted and refused ones."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import controllers as ctrl
from adaptive.base.errors import AdaptiveError, BatchSizeError, CollectiveError, WorkerCountError
from adaptive.graph.trace import trace
from adaptive.operators.hooks import hook_p

from .observations import observe


class Noise(NamedTuple):
    scale: float
    lower: float


def control(**kwargs) -> ctrl.Control:
    return ctrl.Control(observe(**kwargs), "adapt", " (driver.py:15)")


def test_a_control_reads_the_step():
    c = control(step=7, batch_sizes=(3, 5), global_batch=16)
    assert (c.step, c.epoch, c.workers, c.batch_sizes, c.global_batch) == (7, 0.07, 2, (3, 5), 16)


def test_no_request_is_no_decision():
    c = control()
    c.barrier()
    assert c.close() is None


@pytest.mark.parametrize("number", [64, 64.3, np.float32(64), np.int64(64), np.asarray(64), jnp.asarray(64.0)])
def test_any_scalar_is_a_global_batch(number):
    c = control()
    c.rescale(global_batch=number)
    assert c.close().global_batch == 64


@pytest.mark.parametrize(("asked", "got"), [(0, 4), (3.4, 4), (1e30, 400), (401, 400), (4, 4), (400.4, 400)])
def test_requests_are_passed_on_and_their_feasible_part_is_shown(asked, got):
    c = control(batch_sizes=(8, 8, 8, 8), upper=100)
    c.rescale(global_batch=asked)
    assert c.global_batch == got
    assert c.close() == ad.Decision(global_batch=round(asked))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (np.nan, "np.isfinite(noise.scale)"),
        (np.float32("nan"), "ctrl.noise_batch("),
        (np.inf, "max_batch"),
        (-3, "negative"),
        (np.ones(3), r"shape (3,)"),
        ([1.0], r"shape (1,)"),
        (Noise(1.0, 2.0), "scale, lower"),
        (True, "True"),
        ("many", "many"),
    ],
)
def test_an_impossible_global_batch_is_refused_by_name(wrong, says):
    c = control(step=20)
    with pytest.raises(BatchSizeError) as error:
        c.rescale(global_batch=wrong)
    message = str(error.value)
    assert says in message
    assert message.startswith("hook 'adapt' (driver.py:15), step 20: rescale(global_batch=")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([1.0], "2 of them; got shape (1,)"),
        (3.0, "one number per worker"),
        ([1.0, -1.0], "worker 1 is negative"),
        ([np.nan, 1.0], "worker 0 is NaN"),
        ([np.inf, 1.0], "worker 0 is infinite"),
        ([0.0, 0.0], "shares are all zero"),
        (["a", "b"], "numbers"),
        (np.ones((2, 2)), "shape (2, 2)"),
    ],
)
def test_impossible_shares_are_refused_by_name(wrong, says):
    with pytest.raises(BatchSizeError) as error:
        control().rescale(shares=wrong)
    assert says in str(error.value)
    assert "'adapt'" in str(error.value)


@pytest.mark.parametrize(
    ("number", "asked"),
    [(3, 3), (2.6, 3), (np.float32(3.4), 3), (np.int64(3), 3), (jnp.asarray(3.0), 3), (1e9, 10**9), (0.3, 1)],
)
def test_any_positive_scalar_is_a_number_of_workers(number, asked):
    c = control(batch_sizes=(8,) * 4, workers=(2, 1, 4))
    assert (c.target_workers, c.most_workers) == (2, 4)
    c.rescale(workers=number)
    assert c.target_workers == min(asked, 4)
    assert c.close() == ad.Decision(workers=asked)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (0, "control.stop()"),
        (-2, "control.stop()"),
        (-0.2, "control.stop()"),
        (np.nan, "np.isfinite(noise.scale)"),
        (np.inf, "control.most_workers"),
        (np.ones(2), "shape (2,)"),
        (Noise(1.0, 2.0), "must be one number"),
        (True, "True"),
        ("two", "two"),
    ],
)
def test_an_impossible_number_of_workers_is_refused_by_name(wrong, says):
    with pytest.raises(WorkerCountError) as error:
        control(step=20).rescale(workers=wrong)
    assert says in str(error.value)
    assert str(error.value).startswith("hook 'adapt' (driver.py:15), step 20: rescale(workers=")


def test_a_policy_may_ask_for_workers_and_passes_the_same_check():
    policy = ctrl.Policy(lambda n: (), lambda o, s: (ad.Decision(workers=o.values[0]), s), "grow")
    handler = handler_of(policy).handler
    assert handler(observe(2.7), ())[0] == ad.Decision(workers=3)
    with pytest.raises(WorkerCountError, match="'grow'"):
        handler(observe(np.nan), ())


def test_rescale_to_nothing_is_refused():
    with pytest.raises(BatchSizeError, match="none of global_batch=, shares= and workers="):
        control().rescale()


def test_a_control_used_after_its_hook_is_refused():
    c = control()
    c.close()
    for request in (c.barrier, c.stop, lambda: c.rescale(global_batch=8)):
        with pytest.raises(AdaptiveError, match="after the hook has returned"):
            request()


# --- hook -------------------------------------------------------------------------------------------------------------


def handler_of(fn_or_policy, *values, **kwargs):
    """The hook that a driver which calls ctrl.hook has in its graph."""

    def driver(state, batch):
        ctrl.hook(fn_or_policy, *values, **kwargs)
        return state, {}

    graph = trace(driver, np.zeros((), np.float32), np.zeros((2, 1), np.float32), capacity=2)
    (eqn,) = [e for e in graph.eqns if e.primitive is hook_p]
    return eqn.params["hook"]


def test_a_function_gets_its_values_as_they_were_given():
    seen = []

    def adapt(control, noise, table):
        seen.append((noise, table))
        control.rescale(global_batch=noise.scale)

    found = handler_of(adapt, Noise(1.0, 2.0), {"a": np.ones(2)}, every=5)
    assert (found.name, found.every, found.handler.every_step) == ("adapt", 5, False)
    values = (Noise(np.float64(48.0), np.float64(2.0)), {"a": np.ones(2)})
    decision, state = found.handler(observe(*values), found.handler.init(2))
    ((noise, table),) = seen
    assert isinstance(noise, Noise)
    assert table["a"].shape == (2,)
    assert decision.global_batch == 48
    assert state == ()


def test_hooks_are_named_by_the_function_the_policy_or_the_user():
    policy = ctrl.Policy(lambda n: (), lambda o, s: (None, s), "quiet")
    assert handler_of(policy).name == "quiet"
    assert handler_of(policy, name="loud").name == "loud"
    assert handler_of(lambda c: None).name == "<lambda>"


def test_an_error_in_a_hook_names_its_line():
    def adapt(control):
        raise KeyError("mine")

    handler = handler_of(adapt).handler
    with pytest.raises(KeyError, match="mine") as error:
        handler(observe(step=12), ())
    (note,) = error.value.__notes__
    assert "'adapt'" in note
    assert "test_control.py:" in note
    assert "step 12" in note


def test_a_policy_is_shown_every_step_but_decides_at_due_ones_only():
    policy = ctrl.Policy(lambda n: 0, lambda o, s: (ad.Decision(global_batch=64), s + 1))
    handler = handler_of(policy, every=10).handler
    assert handler.every_step
    decision, state = handler(observe(due=False), handler.init(2))
    assert decision is None
    assert state == 1
    assert handler(observe(), state) == (ad.Decision(global_batch=64), 2)


def test_a_policy_s_decision_passes_the_same_checks():
    def decide(decision, **kwargs):
        policy = ctrl.Policy(lambda n: (), lambda o, s: (decision, s), "mine")
        return handler_of(policy).handler(observe(**kwargs), ())[0]

    assert decide(ad.Decision(global_batch=99.6, notes=("why",))) == ad.Decision(100, notes=("why",))
    assert decide(ad.Decision(notes=("why",))) == ad.Decision(notes=("why",))
    assert decide(ad.Decision(stop=True)).stop
    with pytest.raises(BatchSizeError, match="'mine'"):
        decide(ad.Decision(shares=(1.0,)))


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_every_is_a_positive_integer(every):
    with pytest.raises(ValueError, match="every="):
        handler_of(lambda c: None, every=every)


def test_a_hook_that_cannot_be_called_is_refused_when_built():
    def adapt(control): ...

    with pytest.raises(ValueError, match="expected a function or a policy"):
        handler_of(3)
    with pytest.raises(ValueError, match=r"with 1 values, but its signature is adapt\(control\)"):
        handler_of(adapt, 1.0)
    with pytest.raises(ValueError, match="pytrees of numbers"):
        handler_of(lambda c, x: None, object())


def test_outside_a_program_a_hook_is_passed_by():
    called = []
    ctrl.hook(lambda control, x: called.append(x), 1.0)
    assert not called


def test_the_error_about_hook_as_a_decorator_says_what_to_write():
    with pytest.raises(CollectiveError, match=r"hook\(\) is not a decorator.*every=10"):

        @ctrl.hook(every=10)
        def adapt_batch_size(control, noise): ...
