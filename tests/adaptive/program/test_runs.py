"""How a run ends: at its limits, at a request, or upon a signal, with its last state on disk and the exit code 143."""

from __future__ import annotations

import logging
import os
import signal
from contextlib import nullcontext

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from adaptive.base.process import signals
from tests.problems import build, descend, make_data


def program_of(driver=descend, data=None, **options):
    return build(driver, jnp.zeros(()), make_data(24) if data is None else data, 6, **options)


def steps_of(program, **limits):
    return [report.step for report in program.run(**limits)]


def test_a_run_ends_at_the_first_of_its_limits():
    with program_of() as program, program_of() as second:  # 4 steps in an epoch
        assert steps_of(program, steps=3) == [1, 2, 3]
        assert steps_of(program, epochs=1) == [4]
        second.restore(program.checkpoint())
        for each in (program, second):  # of which one is resumed
            assert steps_of(each, epochs=2, steps=5) == [5, 6, 7, 8, 9]
            assert (each.steps, each.epoch) == (9, 2)
            assert steps_of(each, steps=0) == []
            assert steps_of(each, steps=3, until_epoch=4) == [10, 11, 12]
            assert steps_of(each, epochs=3, until_step=14) == [13, 14]
            assert steps_of(each, until_epoch=4) == [15, 16]
            assert steps_of(each, until_epoch=4, until_step=20) == []
        assert float(second.state) == float(program.state)


def test_a_hook_or_the_script_can_stop_a_run_and_the_next_run_continues():
    def driver(state, batch):
        ctrl.hook(lambda control: control.step == 3 and control.stop())
        return descend(state, batch)

    with program_of(driver) as program:
        reports = list(program.run(steps=10))
        assert [r.step for r in reports] == [1, 2, 3]
        assert reports[-1].decision == ad.Decision(stop=True)
        for report in program.run():
            if report.step == 5:
                program.stop()
        assert program.steps == 5
        with pytest.raises(ad.DriverError, match="no run is under way"):
            program.stop()
        assert steps_of(program, steps=2) == [6, 7]


def test_a_run_within_the_loop_over_another_is_an_error_and_one_that_was_left_is_none():
    with program_of() as program:
        left = program.run(steps=5)
        next(left)
        assert steps_of(program, steps=2) == [2, 3]
        with pytest.raises(ad.DriverError, match=r"another run\(\) of program .* take steps by  program.step\(\)"):
            next(left)
        with pytest.raises(ad.DriverError, match="another run"):  # and would end at the limit of the other one
            [list(program.run(steps=1)) for _ in program.run(steps=5)]
        assert program.steps == 5


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def undisturbed():
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    yield
    signals.acknowledge_termination()
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before


preempted = pytest.mark.usefixtures("undisturbed")


def send_signal(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@preempted
@pytest.mark.parametrize(
    ("make", "number"), [(nullcontext, signals.SIGNALS[0]), (lambda: comm.DeviceWorld(workers=2), signals.SIGNALS[-1])]
)
def test_the_last_state_is_saved_and_resumed(make, number, tmp_path, caplog):
    """Also without a world's block: a run that keeps checkpoints listens."""
    kept = ad.Checkpoints(tmp_path / "run", every=100)

    def run(program):
        for report in program.run(steps=9, checkpoint=kept):
            if report.step == 4:
                send_signal(number)
                send_signal(signal.SIGTERM)  # the first one is being acknowledged
            assert report.step <= 4

    with make(), program_of() as program:
        with pytest.raises(ad.Preempted) as caught:
            run(program)
        state = program.state
    assert (caught.value.code, caught.value.alone) == (143, False)
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    name = signal.Signals(number).name
    said = f"all workers received a termination signal ({name}): program 1 ('descend') ends after step 4."
    assert record.getMessage() == str(caught.value) == said
    with program_of() as other:
        other.restore(kept)
        np.testing.assert_array_equal(other.state, state)
        assert other.steps == 4


@preempted
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


@preempted
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


@preempted
def test_step_by_step():
    with comm.SoloWorld(), program_of() as program:
        program.step()
        send_signal()
        with pytest.raises(ad.Preempted) as caught:
            program.step()
        assert (program.steps, caught.value.code) == (1, 143)
