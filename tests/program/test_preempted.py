"""A process that receives SIGTERM: its run ends between two steps, the last state is on disk, the exit code 143."""

from __future__ import annotations

import logging
import os
import signal

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from adaptive.base.process import signals
from tests.program.problems import build, descend, make_data


@pytest.fixture(autouse=True)
def undisturbed():
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    yield
    signals.acknowledge_termination()
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before


def send_signal(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def program_of(driver=descend, **options):
    return build(driver, jnp.zeros(()), make_data(), 12, **options)


@pytest.mark.parametrize(
    ("make", "number"), [(None, signals.SIGNALS[0]), (lambda: comm.DeviceWorld(workers=2), signals.SIGNALS[-1])]
)
def test_the_last_state_is_saved_and_resumed(make, number, tmp_path, caplog):
    """Also without a world's block: a run that keeps checkpoints listens."""
    kept, steps = ad.Checkpoints(tmp_path / "run", every=100), []

    def run(program):
        for report in program.run(steps=9, checkpoint=kept):
            steps.append(report.step)
            if report.step == 4:
                send_signal(number)
                send_signal(signal.SIGTERM)  # the first one is being acknowledge_termination

    def train():
        with program_of() as program:
            with pytest.raises(ad.Preempted) as caught:
                run(program)
            return program.state, caught.value

    if make is None:
        state, error = train()
    else:
        with make():
            state, error = train()
    assert steps == [1, 2, 3, 4]
    assert (error.code, error.alone) == (143, False)
    name = signal.Signals(number).name
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    said = f"all workers received a termination signal ({name}): program 1 ('descend') ends after step 4."
    assert record.getMessage() == str(error) == said
    with program_of() as other, program_of() as whole:
        other.restore(kept)
        np.testing.assert_array_equal(other.state, state)
        list(other.run(steps=5))
        list(whole.run(steps=9))
        np.testing.assert_allclose(other.state, whole.state, rtol=1e-6)


def test_without_checkpoints_the_run_ends_all_the_same(caplog):
    with comm.SoloWorld(), program_of() as program:
        send_signal()
        with pytest.raises(ad.Preempted, match=r"saves no checkpoint, because run\(\) has no checkpoint="):
            list(program.run(steps=9))
        assert program.steps == 0
        assert len(list(program.run(steps=2))) == 2  # a script that catches it may continue


def where(phase):
    """A driver and an evaluated function that send the signal in this phase."""
    seen = []

    def once(name):
        if name == phase and not seen:
            seen.append(name)
            send_signal()

    def watch(control):
        once("a hook")

    def driver(state, batch):
        once("tracing")
        ctrl.hook(watch)
        return descend(state, batch)

    def evaluated(state, batch):
        once("evaluate")
        return jnp.square(batch["x"].sum(1) - state).mean()

    return driver, evaluated, once


@pytest.mark.parametrize(
    ("phase", "last"), [("tracing", 0), ("a hook", 1), ("evaluate", 2), ("a checkpoint", 2), ("after a run", 3)]
)
def test_a_signal_waits_for_the_next_point_between_two_steps(phase, last, tmp_path):
    driver, evaluated, once = where(phase)
    options = ad.Checkpoints(tmp_path / "run", every=100)

    def train(program):
        for report in program.run(steps=3, checkpoint=options):
            if report.step == 2:
                program.evaluate(evaluated, make_data())
                once("a checkpoint")
                program.checkpoint()
        once("after a run")
        list(program.run(steps=3, checkpoint=options))

    with comm.SoloWorld(), program_of(driver) as program, pytest.raises(ad.Preempted):
        train(program)
    assert program.steps == last
    assert int(options.read()["step"]) == last


def test_step_by_step():
    with comm.SoloWorld(), program_of() as program:
        program.step()
        send_signal()
        with pytest.raises(ad.Preempted) as caught:
            program.step()
        assert (program.steps, caught.value.code) == (1, 143)
