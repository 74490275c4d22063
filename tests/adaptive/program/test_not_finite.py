"""Values that are not finite: the worker, the line, and the outcome of the step."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.runtime.local_world import LocalWorld
from tests.problems import build, stream

X = {"x": np.arange(24.0, dtype=np.float32)}


def total(state, batch):
    """A driver with nothing wrong."""
    mean = comm.all_reduce(batch["x"].mean())
    return state + mean, {"mean": mean}


@pytest.fixture(scope="module")
def world():
    return LocalWorld(3)


POISONED = {"x": X["x"].copy()}  # the last worker meets a NaN in the second step of 12 examples
POISONED["x"][stream(24, 3, 24)[23]] = np.nan


def test_contributions_that_are_not_finite_raise(world):
    with build(total, 0.0, POISONED, 12, world=world) as program:
        before = float(program.step().metrics["mean"])
        with pytest.raises(ad.NonFiniteError) as caught:
            program.step()
        text = str(caught.value)
        assert "step 2: the contributions of worker 2 to all_reduce (test_not_finite.py:" in text
        assert "On worker 2 batch['x'] holds NaNs." in text
        assert 'nonfinite="skip"' in text
        assert program.steps == 1
        assert float(program.state) == before  # the state of the step before


def test_of_two_messages_either_may_be_not_finite(world):
    def driver(state, batch):
        mean = comm.all_reduce(jnp.nan_to_num(batch["x"]).mean())
        spread = comm.all_reduce(jnp.where(ad.step_number() == 0, 0.0, 1.0) * jnp.square(batch["x"] - mean).mean())
        first = comm.all_reduce(
            jnp.where(ad.step_number() == 2, jnp.inf, 0.0) * (1 + jnp.nan_to_num(batch["x"]).mean())
        )
        return state + mean + spread * 0, {"first": first}

    with build(driver, 0.0, POISONED, 12, world=world, nonfinite="skip") as program:
        reports = [program.step() for _ in range(3)]
    assert reports[0].messages == 2
    assert [r.skipped for r in reports] == [False, True, True]
    assert all("hold infinities or NaNs" in r.notes[0] for r in reports[1:])
    assert [r.messages for r in reports] == [2, 2, 1]  # nothing is sent behind bad news


def masked(state, batch):
    """A mean over examples that count; in the second step of twelve there are none."""
    counts = jnp.where(ad.step_number() == 1, 0.0, 1.0) * (1 + 0 * batch["x"])
    mean = (counts * batch["x"]).sum() / jnp.maximum(counts.sum(), 1)
    mean = comm.all_reduce(mean, weight=counts.sum())
    return state + mean, {"mean": mean}


NOTHING = r"is a mean over no examples: the weights of all workers are zero"


def test_a_mean_of_nothing_is_skipped_or_allowed(world):
    with build(masked, 0.0, X, 12, world=world, nonfinite="skip") as program:
        reports = list(program.run(steps=3))
        assert [r.skipped for r in reports] == [False, True, False]
        assert re.search(NOTHING, reports[1].notes[0])
        assert np.isfinite(program.state)
    with build(masked, 0.0, X, 12, world=world, nonfinite="allow") as program:
        assert np.isnan(list(program.run(steps=2))[-1].metrics["mean"])


def test_an_update_that_makes_nans_is_found_in_the_next_step(world, tmp_path, caplog):
    """And no checkpoint of it is written."""

    def driver(state, batch):
        new = state + 0 * comm.all_reduce((batch["x"] * state).mean())
        return jnp.where(ad.step_number() == 1, jnp.log(-new), new), {}

    checkpoint = ad.Checkpoints(tmp_path, every="1 step")
    with build(driver, 1.0, X, 12, world=world) as program:
        list(program.run(steps=2, checkpoint=checkpoint))
        assert "no checkpoint of step 2: state holds NaNs" in caplog.text
        assert np.isnan(program.state)
        with pytest.raises(ad.NonFiniteError, match=r"no checkpoint of step 2: state holds NaNs\. Continue from"):
            program.checkpoint()
        text = r"On worker 0 state holds NaNs\.\n(.|\n)*program\.restore"
        with pytest.raises(ad.NonFiniteError, match=text) as caught:
            program.step()
        assert "step 3: the contributions of worker" in str(caught.value)
        assert program.steps == 2
        program.restore(checkpoint)
        assert program.steps == 1
        assert program.state == 1.0


def test_steps_are_not_skipped_for_ever(world):
    data = {"x": np.full(24, np.inf, np.float32)}
    with build(total, 0.0, data, 12, world=world, nonfinite="skip") as program:
        reports = []
        with pytest.raises(ad.NonFiniteError) as caught:
            reports.extend(program.step() for _ in range(30))
        text = str(caught.value)
        assert "25 steps in a row were skipped before" in text
        assert "step 26: the contributions of worker" in text
        assert "batch['x'] holds infinities" in text
        assert "The state is that of step 0" in text
        assert 'nonfinite="allow"' in text
        assert program.steps == 25
        assert program.state == 0.0
