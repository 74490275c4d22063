"""Hyperparameters: valid and invalid requests."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from adaptive.runtime.local_world import LocalWorld


def program_of(hook, *, first=0.5):
    def driver(state, batch):
        lr, k = ad.hyperparameter("lr", first), ad.hyperparameter("k", 3)
        ctrl.hook(hook)
        return state - lr.astype(float) * k.astype(float) * comm.all_reduce(batch["x"].mean()), {}

    return ad.Program(driver, 0.0, {"x": jnp.ones(8)}, global_batch=4, world=LocalWorld(2), resizable=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lrr": 0.1}, "no hyperparameter 'lrr'; it has k, lr"),
        ({"lr": float("nan")}, "set_hyperparameters(lr=nan): lr is not finite"),
        ({"lr": [0.1, 0.2]}, "lr must be one number"),
        ({"k": 2.5}, "k must be a whole number"),
        ({}, "set_hyperparameters() without a value"),
        ({"lr": 1e39}, "set_hyperparameters(lr=1e+39): lr does not fit into float32"),
        ({"k": 3e9}, "k does not fit into int32"),
    ],
)
def test_impossible_values_are_refused_with_the_hooks_line(values, message):
    def hook(control):
        control.set_hyperparameters(**values)

    with program_of(hook) as program, pytest.raises(ad.DriverError) as caught:
        program.step()
    assert message in str(caught.value)
    assert "hook 'hook' (test_hyperparameters.py:" in str(caught.value)
    with program_of(lambda control: None) as program, pytest.raises(ad.DriverError) as caught:
        program.set_hyperparameters(**values)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("learning rate", 0.1, "the name"), ("lr", float("inf"), "finite"), ("lr", "fast", "finite")],
    ids=["name", "infinite", "text"],
)
def test_invalid_hyperparameters_are_refused_when_the_program_is_built(name, value, message):
    def driver(state, batch):
        return state + comm.all_reduce(batch["x"].mean()) * ad.hyperparameter(name, value), {}

    with pytest.raises(ad.DriverError, match=message):
        ad.Program(driver, 0.0, {"x": jnp.ones(8)}, global_batch=4)


def test_a_first_value_that_its_type_cannot_hold_is_refused():
    with pytest.raises(ad.DriverError, match=r"'lr' \(test_hyper.*: its initial value does not fit into int32"):
        ad.hyperparameter("lr", 2**31)


def test_an_integer_hyperparameter_takes_integers_only():
    def driver(state, batch):
        widths = ad.hyperparameter("widths", [3, 4])
        return state + widths.sum().astype(float) * comm.all_reduce(batch["x"].mean()), {}

    with ad.Program(driver, 0.0, {"x": jnp.ones(8)}, global_batch=4) as program:
        for values in ([1.5, 2.0], [2.0, 2.999], [1, float("nan")]):
            with pytest.raises(ad.DriverError):
                program.set_hyperparameters(widths=values)
        with pytest.raises(ad.DriverError, match=r"an array of shape \(2,\)"):
            program.set_hyperparameters(widths=[1, 2, 3])
        program.set_hyperparameters(widths=[2**31 - 1, -(2**31)])
        assert program.hyperparameters["widths"] == [2**31 - 1, -(2**31)]
        program.set_hyperparameters(widths=np.array([5.0, 6.0]))
        assert program.hyperparameters["widths"] == [5, 6]
        assert float(program.step().hyperparameters["widths"][1]) == 6


def test_a_request_that_is_refused_changes_nothing():
    with program_of(lambda control: None) as program:
        with pytest.raises(ad.DriverError):
            program.set_hyperparameters(k=4, lr=1e39)
        assert program.hyperparameters == {"lr": 0.5, "k": 3}
        program.step()


def test_one_name_has_one_first_value():
    def driver(state, batch):
        both = ad.hyperparameter("lr", 0.1) + ad.hyperparameter("lr", 0.2)
        return state + both * comm.all_reduce(batch["x"].mean()), {}

    with pytest.raises(ad.DriverError, match=r"'lr' .* is 0.1\d* \(float32\) elsewhere, and 0.2"):
        ad.Program(driver, 0.0, {"x": jnp.ones(8)}, global_batch=4)


def test_a_later_hook_sees_requests_of_an_earlier_one():
    seen = []

    def driver(state, batch):
        lr = ad.hyperparameter("lr", 1.0)
        ctrl.hook(lambda control: control.set_hyperparameters(lr=0.5), name="first")
        ctrl.hook(lambda control: seen.append(control.hyperparameters["lr"]), name="second")
        return state - lr * comm.all_reduce(batch["x"].mean()), {}

    with ad.Program(driver, 0.0, {"x": jnp.ones(8)}, global_batch=4, resizable=False) as program:
        program.step()
    assert seen == [0.5]
