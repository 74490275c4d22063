"""Hyperparameters: what can be asked for, what is refused and in which words, and the policies that set them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from adaptive.runtime.local_world import LocalWorld

from .observations import observe


def program_of(hook, *, first=0.5):
    def driver(state, batch):
        lr, k = ad.hyperparameter("lr", first), ad.hyperparameter("k", 3)
        ctrl.hook(hook)
        return state - lr * k.astype(float) * comm.all_reduce(batch["x"].mean()), {}

    return ad.Program(driver, 0.0, {"x": jnp.ones(8)}, global_batch=4, world=LocalWorld(2), resizable=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lrr": 0.1}, "no hyperparameter 'lrr'; it has k, lr"),
        ({"lr": float("nan")}, "set(lr=nan): not finite"),
        ({"lr": [0.1, 0.2]}, "lr is one number"),
        ({"lr": "0.1"}, "lr is one number"),
        ({"k": 2.5}, "k is a whole number"),
        ({}, "set() without a value"),
    ],
    ids=["unknown", "not a number", "another shape", "text", "a fraction", "nothing"],
)
def test_what_cannot_be_is_refused_with_the_hooks_line(values, message):
    def hook(control):
        control.set(**values)

    with program_of(hook) as program, pytest.raises(ad.DriverError) as caught:
        program.step()
    assert message in str(caught.value)
    assert "hook 'hook' (test_hyperparameters.py:" in str(caught.value)
    with program_of(lambda control: None) as program, pytest.raises(ad.DriverError) as caught:
        program.set(**values)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("learning rate", 0.1, "the name"), ("lr", float("inf"), "finite"), ("lr", "fast", "finite")],
    ids=["name", "infinite", "text"],
)
def test_what_cannot_be_one_is_refused_when_the_program_is_built(name, value, message):
    def driver(state, batch):
        return state + comm.all_reduce(batch["x"].mean()) * ad.hyperparameter(name, value), {}

    with pytest.raises(ad.DriverError, match=message):
        ad.Program(driver, 0.0, {"x": jnp.ones(8)}, global_batch=4)


def test_one_name_has_one_first_value():
    def driver(state, batch):
        both = ad.hyperparameter("lr", 0.1) + ad.hyperparameter("lr", 0.2)
        return state + both * comm.all_reduce(batch["x"].mean()), {}

    with pytest.raises(ad.DriverError, match=r"'lr' .* is 0.1\d* \(float32\) elsewhere, and 0.2"):
        ad.Program(driver, 0.0, {"x": jnp.ones(8)}, global_batch=4)


def test_a_later_hook_sees_what_an_earlier_one_asked_for():
    seen = []

    def driver(state, batch):
        lr = ad.hyperparameter("lr", 1.0)
        ctrl.hook(lambda control: control.set(lr=0.5), name="first")
        ctrl.hook(lambda control: seen.append(control.hyperparameters["lr"]), name="second")
        return state - lr * comm.all_reduce(batch["x"].mean()), {}

    with ad.Program(driver, 0.0, {"x": jnp.ones(8)}, global_batch=4, resizable=False) as program:
        program.step()
    assert seen == [0.5]


def test_outside_a_program_it_is_its_first_value():
    assert float(ad.hyperparameter("lr", 0.25)) == 0.25


# --- policies ---------------------------------------------------------------------------------------------------------


def run(policy, values, epoch=0.0):
    """What a policy asks for, step by step, where what it asks for is so from then on."""
    state, known, asked = policy.init(2), {"lr": 1.0}, []
    for step, value in enumerate(values, 1):
        observation = observe(*value, step=step)._replace(epoch=epoch, hyperparameters=dict(known))
        decision, state = policy.update(observation, state)
        asked.append(None if decision is None else dict(decision.hyperparameters))
        known |= asked[-1] or {}
    return asked


def test_a_plateau_is_noticed():
    losses = [(v,) for v in (3.0, 2.0, 2.0, 2.0, 1.0, 1.0, np.nan, 1.0)]
    assert run(ctrl.plateau("lr", factor=0.5, patience=1), losses) == [
        *(None, None, None),
        {"lr": 0.5},
        *(None, None, None),
        {"lr": 0.25},
    ]
    accuracies = [(-v,) for (v,) in losses]
    best = run(ctrl.plateau("lr", factor=0.5, patience=1, mode="max"), accuracies)
    assert best == run(ctrl.plateau("lr", factor=0.5, patience=1), losses)
    assert run(ctrl.plateau("lr", factor=0.5, patience=0, least=0.4), [(1.0,)] * 4) == [
        None,
        {"lr": 0.5},
        {"lr": 0.4},
        None,
    ]


def test_policies_refuse_what_cannot_be_meant():
    with pytest.raises(ValueError, match="mode"):
        ctrl.plateau("lr", mode="best")
    with pytest.raises(ValueError, match="give a function"):
        ctrl.by_epochs(lr=0.1)
    with pytest.raises(ValueError, match="momentum"):
        ctrl.momentum_of_batch("momentum", 1.5, base=64)


def test_examples_are_epochs_of_so_many():
    by_examples = ctrl.by_examples(100, lr=lambda n: 1 / (1 + n))
    assert run(by_examples, [()], epoch=0.5) == run(ctrl.by_epochs(lr=lambda e: 1 / (1 + 100 * e)), [()], epoch=0.5)
