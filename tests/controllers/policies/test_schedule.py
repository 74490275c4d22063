"""`schedule`: the global batch and hyperparameters by steps, examples, tokens or epochs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from tests.controllers.observations import observe


def decided(policy, *, lr=None, **seen):
    """What a policy without memory requests: a global batch, and hyperparameters."""
    known = {} if lr is None else {"lr": lr}
    decision, state = policy.update(observe(**seen)._replace(hyperparameters=known), policy.init(2))
    assert state == policy.init(2)
    return (None, {}) if decision is None else (decision.global_batch, dict(decision.hyperparameters))


def asked(policy, **seen):
    return decided(policy, **seen)[0]


def test_a_schedule_of_steps():
    policy = ctrl.schedule({0: 64, 10: 128, 100: 512})
    assert asked(policy, step=9) is None
    assert asked(policy, step=10) == 128
    assert asked(policy, step=10, global_batch=128) is None
    assert asked(policy, step=10**6) == 512
    assert asked(policy, step=10**6, due=False) is None


@pytest.mark.parametrize(
    ("point", "options", "first"),
    [
        (20, {}, {"step": 20}),
        ("20 steps", {"by": "epochs"}, {"step": 20}),
        (0.5, {"by": "epochs"}, {"step": 50}),
        ("0.5 epochs", {}, {"step": 50}),
        (2000, {"by": "examples"}, {"examples": 2000}),
        ("2_000 examples", {}, {"examples": 2000}),
        ("2e3tokens", {"tokens_per_example": 8}, {"examples": 250}),
        ("1 token", {"tokens_per_example": 0.5}, {"examples": 2}),
        ("80%", {"total": "3000 examples"}, {"examples": 2400}),
        ("12.5 %", {"total": 160}, {"step": 20}),
        ("5e12 tokens", {"tokens_per_example": 1000}, {"examples": 5 * 10**9}),
    ],
)
def test_points_in_each_unit(point, options, first):
    policy = ctrl.schedule({0: 64, point: 96}, **options)
    before = {name: count - 1 for name, count in first.items()}
    assert [asked(policy, **{"step": 0, **seen}) for seen in (before, first)] == [None, 96]


def test_of_points_in_several_units_the_last_that_is_reached_holds():
    policy = ctrl.schedule({0: 64, "100 examples": 96, 7: 128, "200 examples": 256})
    assert asked(policy, step=6, examples=150) == 96
    assert asked(policy, step=7, examples=10) == 128
    assert asked(policy, step=6, examples=200) == 256


def test_functions_and_hyperparameters():
    assert asked(ctrl.schedule(lambda step: np.float32(64.4 * step)), step=2) == 129
    lr = optax.linear_schedule(1.0, 0.0, 5e9)  # more than int32 holds
    both = ctrl.schedule({0: 64, "4e9 tokens": 96}, tokens_per_example=2, by="tokens", lr=lr)
    assert decided(both, examples=2 * 10**9) == (96, {"lr": pytest.approx(0.2)})
    assert decided(both, examples=0, lr=1.0) == (None, {})
    stairs = ctrl.schedule(by="examples", lr={0: 0.1, 500: [0.5, 0.25]})
    assert decided(stairs, examples=499, lr=0.1) == (None, {})
    assert decided(stairs, examples=500, lr=[0.1, 0.1]) == (None, {"lr": [0.5, 0.25]})
    switch = ctrl.schedule(lr={0: True, 5: False})
    assert [decided(switch, step=step, lr=True) for step in (4, 5)] == [(None, {}), (None, {"lr": False})]
    for wrong in ([1.0, 1.0, 1.0], [1.0], None):  # which the request refuses
        assert decided(ctrl.schedule(lr=lambda step, wrong=wrong: wrong), lr=[1.0, 1.0]) == (None, {"lr": wrong})


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (None, {}, "give a schedule"),
        ({}, {}, "the global batch is a mapping from points to values"),
        (64, {}, "the global batch is a mapping from points to values"),
        (None, {"lr": 0.1}, "lr is a mapping from points to values"),
        ({10: 64}, {}, "the first point of the global batch must be 0; it is 10"),
        ({0: 64, 20: 96, 10: 128}, {}, "must ascend"),
        ({0: 64, "1 epoch": 96, "1.0 epochs": 128}, {}, "must ascend"),
        ({0: 64, "soon": 96}, {}, "'soon' is not a point of a run. Write 1000"),
        ({0: 64, "10 minutes": 96}, {}, "'10 minutes' is not a point"),
        ({0: 64, "1.2.3 steps": 96}, {}, "'1.2.3 steps' is not a point"),
        ({0: 64, -1: 96}, {}, "-1 is not a point"),
        ({0: 64, float("nan"): 96}, {}, "nan is not a point"),
        ({0: 64, "10e6 tokens": 96}, {}, "tokens_per_example=1024"),
        (None, {"by": "tokens", "lr": lambda n: n}, "tokens_per_example=1024"),
        ({0: 64}, {"tokens_per_example": 0}, "must be positive"),
        ({0: 64, "80%": 96}, {}, "give the length of the run"),
        ({0: 64, "80%": 96}, {"total": "80%"}, "give the length of the run"),
        ({0: 64, 10: 0}, {}, "the global batch at 10 is 0; a global batch is a whole number"),
        ({0: 64, 10: 2.5}, {}, "the global batch at 10 is 2.5"),
        (None, {"lr": {0: 0.1, 5: float("nan")}}, "lr at 5 is nan; a hyperparameter is finite"),
        (None, {"lr": {0: 0.1, 5: "small"}}, "lr at 5 is 'small'"),
        ({0: 1}, {"by": "minute"}, "'minute'"),
    ],
)
def test_what_is_no_schedule_is_refused(given, options, message):
    with pytest.raises(ValueError, match="schedule: ") as caught:
        ctrl.schedule(given, **options)
    assert message in str(caught.value)


def test_examples_are_counted_through_changes_of_the_batch_and_a_restore():
    """By tokens of 2 an example: at 24 tokens, 12 examples, the batch doubles; at 60 % of 80 tokens it is 16."""

    def driver(w, batch):
        lr = ad.hyperparameter("lr", 1.0)
        ctrl.hook(
            ctrl.schedule(
                {0: 4, "24 tokens": 8, "60%": 16},
                by="examples",
                total="80 tokens",
                tokens_per_example=2,
                lr=lambda n: n,
            )
        )
        return w + comm.all_reduce(batch["x"].mean()), {"lr": lr}

    def steps(program, count):
        reports = list(program.run(steps=count))
        return [(r.global_batch, r.examples, float(r.metrics["lr"])) for r in reports]

    def program():
        return ad.Program(driver, jnp.zeros(()), {"x": np.ones(64, np.float32)}, global_batch=4, deterministic=True)

    with program() as first, program() as second:
        found = steps(first, 4)
        second.restore(first.checkpoint())
        found += steps(second, 2)
        first.rescale(global_batch=2)  # by hand: the policy asks again
        assert steps(first, 2) == [(2, 22, 20.0), (8, 30, 22.0)]
    assert found == [(4, 4, 1.0), (4, 8, 4.0), (4, 12, 8.0), (8, 20, 12.0), (8, 28, 20.0), (16, 44, 28.0)]
