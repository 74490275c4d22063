"""Learning-rate rules: their factors, and that they follow the batch while a program runs."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import controllers as ctrl
from monitors import NoiseScale


class Noise(NamedTuple):
    scale: jax.Array


def factors(rule, batches, *, noise=None, dtype="float32", **settings):
    """What updates are multiplied by in a program whose hook sets these global batches, one after the other."""
    tx = optax.chain(optax.sgd(1.0), ctrl.scale_by_batch(rule, base=4, **settings))
    params = {"w": jnp.zeros(3, dtype)}

    def driver(state, batch):
        params, opt_state = state
        extra = {} if noise is None else {"noise": Noise(jnp.float32(noise))}
        updates, opt_state = tx.update({"w": -jnp.ones(3, dtype)}, opt_state, params, **extra)
        ctrl.hook(lambda control: control.rescale(global_batch=[*batches, batches[-1]][control.step]))
        return (params, opt_state), {"factor": updates["w"][0], "progress": optax.tree.get(opt_state, "progress")}

    program = ad.Program(
        driver, (params, tx.init(params)), {"x": np.zeros((64, 1), np.float32)}, global_batch=batches[0]
    )
    reports = [program.step() for _ in batches]
    assert [r.global_batch for r in reports] == list(batches)
    found = [float(r.metrics["factor"]) for r in reports]
    np.testing.assert_allclose([float(r.metrics["progress"]) for r in reports], np.cumsum(found), rtol=1e-6)
    return found


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("fixed", [1, 1, 1]), ("linear", [1, 2, 16]), ("sqrt", [1, math.sqrt(2), 4])],
)
def test_the_factor_follows_the_global_batch_of_the_step(rule, expected):
    np.testing.assert_allclose(factors(rule, [4, 8, 64]), expected, rtol=1e-6)


def test_adascale():
    # r = (noise/base + 1) / (noise/batch + 1)
    np.testing.assert_allclose(factors("adascale", [4, 8, 64], noise=8.0), [1, 3 / 2, 3 / (1 + 1 / 8)], rtol=1e-6)
    np.testing.assert_allclose(factors("adascale", [4, 64], noise=1e9), [1, 16], rtol=1e-5)  # noise alone: linear
    np.testing.assert_allclose(factors("adascale", [4, 64], noise=math.inf), [1, 16], rtol=1e-6)
    np.testing.assert_allclose(factors("adascale", [4, 64], noise=0.0), [1, 1], rtol=1e-6)  # no noise: nothing gained
    np.testing.assert_allclose(factors("adascale", [4, 64], noise=math.nan), [1, 1], rtol=1e-6)  # not known yet
    np.testing.assert_allclose(factors("adascale", [4, 64], noise=1e9, power=0.5), [1, 4], rtol=1e-5)


@pytest.mark.parametrize(("rule", "dtype"), [("sqrt", "float64"), ("adascale", "float32")])
def test_in_double_precision_a_state_keeps_its_dtypes(rule, dtype):
    with jax.enable_x64(True):
        found = factors(rule, [4, 8, 64], noise=8.0 if rule == "adascale" else None, warmup=2, dtype=dtype)
    assert found[0] == 1


def test_a_warm_up_goes_to_the_new_factor_over_some_steps():
    found = factors("linear", [8] * 12, warmup=3)
    assert found[0] == pytest.approx(2 - 2 / 3)
    assert np.all(np.diff(found) > 0)
    assert found[-1] == pytest.approx(2, rel=0.01)


def test_without_a_signal_the_last_factor_stays():
    tx = ctrl.scale_by_batch("adascale", base=4)

    def driver(state, batch):
        opt_state, total = state
        signal = jnp.array([1.0, -1.0, -1.0, 1.0])[ad.step_number()]
        updates, opt_state = tx.update(
            jnp.ones(()), opt_state, noise=NoiseScale(*jnp.float32([8.0, 8.0, signal, 8.0, 9.0]))
        )
        ctrl.hook(lambda control: control.rescale(global_batch=[8, 8, 5, 8, 8][control.step]))
        return (opt_state, total + updates), {"factor": updates}

    with ad.Program(driver, (tx.init(None), 0.0), np.zeros((64, 1), np.float32), global_batch=8) as program:
        found = [float(program.step().metrics["factor"]) for _ in range(4)]
    np.testing.assert_allclose(found, [1.5, 1.5, 1.25, 1.5], rtol=1e-6)  # at most s = 5 / 4 in step 3


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_outside_a_program_there_is_no_batch_and_updates_stay_as_they_are(rule):
    tx = ctrl.scale_by_batch(rule, base=4)
    updates, _ = tx.update(jnp.ones(3), tx.init(jnp.ones(3)))
    assert updates.tolist() == [1, 1, 1]


def test_impossible_arguments_are_refused():
    with pytest.raises(ValueError, match="'sqrt'"):
        ctrl.scale_by_batch("cubic", base=256)
    with pytest.raises(ValueError, match="base"):
        ctrl.scale_by_batch("sqrt", base=0)
    tx = ctrl.scale_by_batch("adascale", base=256)
    with pytest.raises(TypeError, match="noise=noise"):
        tx.update({"w": jnp.ones(2)}, tx.init(None))
