"""Listeners are called for every step, and an error in one affects nothing else."""

from __future__ import annotations

import json
import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from adaptive.base.decision import Decision
from adaptive.extend import StepEvent
from adaptive.program import reports as _reports
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import event, make_data


def adapt(control, noise, rows, *rest):
    if control.step == 2:
        control.rescale(global_batch=6)


def listen(control, loss):
    pass


def driver(state, batch):
    mean = comm.all_reduce(batch["y"].mean())
    noise = mon.NoiseScale(mean, mean, mean, mean, mean)
    seconds = comm.all_gather(mon.compute_seconds())
    ctrl.hook(adapt, noise, {"a": seconds}, mean, every=2)
    ctrl.hook(ctrl.balance(), seconds)
    ctrl.hook(ctrl.Policy(lambda n: (), lambda o, s: (None, s), "mine"), mean)
    ctrl.hook(listen, mean)
    return state + mean, {}


def build(driver=driver, **options):
    options = {"global_batch": 4, "world": LocalWorld(2), "deterministic": True, **options}
    return ad.Program(driver, 0.0, make_data(24), **options)


@pytest.fixture
def events():
    with build() as program:
        program.warm_up()  # a step beside a compiler has no seconds
        heard: list[StepEvent] = []
        program.subscribe(heard.append)
        reports = list(program.run(steps=3))
        yield heard, reports


def test_an_event_has_the_report_and_the_values_of_hooks(events):
    heard, reports = events
    assert [event.report for event in heard] == reports
    assert [event.report.decision for event in heard] == [None, Decision(global_batch=6), None]
    assert [event.previous_batch_sizes for event in heard] == [(2, 2)] * 3
    assert [event.epoch for event in heard] == [4 / 24, 8 / 24, 14 / 24]
    first = heard[0].hooks[0]
    assert (first.name, first.every) == ("0/adapt", 2)
    noise = [f"noise.{field}" for field in ("scale", "trace", "signal", "lower", "upper")]
    assert list(first.values) == [*noise, "rows['a']", "value_2"]
    assert heard[0].hooks[1].names == ("seconds",)  # as the policy calls it
    assert heard[0].hooks[2].names == ("value_0",)
    assert heard[0].hooks[3].names == ("loss",)  # as the function calls it
    given, measured = heard[2].hooks[1].values["seconds"], heard[1].report.compute_seconds
    np.testing.assert_array_equal(given, np.float32(measured))


def test_without_listeners_no_event_is_built(monkeypatch):
    with build() as program:
        monkeypatch.setattr(_reports, "StepEvent", None)
        program.step()
        with program.subscribe(lambda event: None):
            pass
        program.step()  # he has left


class Ratio(NamedTuple):
    """A metric as libraries have them: sums, and a value that is computed of them."""

    above: jax.Array
    below: jax.Array

    def compute(self):
        return self.above / self.below


class Broken(Ratio):
    def compute(self):
        raise ValueError("not on a host")


def test_a_listener_gets_the_computed_values_of_metric_objects(tmp_path):
    def measured(state, batch):
        sums = comm.all_reduce((batch["y"].sum(), (batch["y"] ** 2).sum()), op="sum")
        several = nnx.MultiMetric(accuracy=nnx.metrics.Average("hits"), loss=nnx.metrics.Average("losses"))
        several.update(hits=sums[0], losses=sums[1])
        metrics = {"ratio": Ratio(*sums), "broken": Broken(*sums), "of": {"nnx": several}, "mean": sums[0]}
        return state + sums[0], metrics

    heard: list[StepEvent] = []
    log = [ad.log.JSONL(tmp_path / "run.jsonl"), ad.log.CSV(tmp_path / "run.csv")]
    with build(measured) as program, program.subscribe(heard.append):
        (report,) = list(program.run(steps=1, log=log))
    ratio = report.metrics["ratio"]
    expected = {
        "broken.above": ratio.above,
        "broken.below": ratio.below,
        "mean": ratio.above,
        "of.nnx.accuracy": ratio.above,
        "of.nnx.loss": ratio.below,
        "ratio": ratio.above / ratio.below,
    }
    assert {name: pytest.approx(float(x)) for name, x in expected.items()} == heard[0].scalars
    assert heard[0].scalars.items() <= ad.log.scalars(heard[0]).items()
    assert json.loads((tmp_path / "run.jsonl").read_text().splitlines()[1])["metrics"] == heard[0].scalars
    header = (tmp_path / "run.csv").read_text().splitlines()[0].split(",")
    assert expected.keys() <= set(header)
    assert not any("value" in name for name in header)


def test_a_step_that_is_skipped_gave_the_hooks_nothing():
    def dividing(state, batch):
        mean = comm.all_reduce(batch["y"].mean() / (ad.step_number() - 1).astype(jnp.float32))
        ctrl.hook(adapt, mean, mean)
        return state + mean, {}

    heard: list[StepEvent] = []
    with build(dividing, nonfinite="skip") as program, program.subscribe(heard.append):
        list(program.run(steps=3))
    assert [event.report.skipped for event in heard] == [False, True, False]
    assert [bool(event.hooks[0].values) for event in heard] == [True, False, True]


def test_a_listener_that_raises_is_removed_and_the_run_continues(caplog):
    calls = {"failing": 0, "well": 0}

    def failing(event):
        calls["failing"] += 1
        raise ZeroDivisionError("by zero")

    def well(event):
        calls["well"] += 1

    with build() as program, caplog.at_level(logging.WARNING, "adaptive"):
        for listener in (failing, well):
            program.subscribe(listener)
        notes = [report.notes for report in program.run(steps=3)]
    why = "listener 'failing' failed, and is disabled: ZeroDivisionError('by zero')"
    assert calls == {"failing": 1, "well": 3}
    assert [[note for note in of_step if "listener" in note] for of_step in notes] == [[why], [], []]
    assert [record.message for record in caplog.records if "listener" in record.message] == [why]


def test_a_listener_cannot_take_a_step():
    with build() as program:
        program.subscribe(lambda event: program.step())
        assert "is already in a step" in program.step().notes[-1]
        assert program.step().step == 2


def test_a_report_prints_as_one_short_line():
    metrics = {"loss": np.float32(0.123456789), "grads": jnp.ones((2, 3)), "fine": jnp.array(True)}
    assert repr(event(3, metrics=metrics).report) == (
        "Report(step=3, epoch=0, global_batch=4, fine=1, grads=float32[2, 3], loss=0.12346, seconds=0.5)"
    )
    assert "metrics=2," in repr(event(1, metrics=jnp.float32(2)).report)
    many = repr(event(1, metrics=list(range(1000)), notes=["clipped"], skipped=True).report)
    assert many.endswith("0=0, 1=1, 2=2, 3=3, …, seconds=0.5, skipped=True, notes=1)")
