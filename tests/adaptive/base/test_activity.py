"""The breakdown of a step's seconds: parts add up however they are nested, and waiting for others is separate."""

from __future__ import annotations

import math
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.base import activity as _activity
from adaptive.base.activity import COMPILING, COMPUTING, EXCHANGING, INPUT, OTHER, Activity, WorkerSeconds
from adaptive.operators.hooks import hook
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import Recorder


class Clock:
    """A clock that the test advances."""

    def __init__(self):
        self.now = self.waited = 0.0

    def perf_counter(self):
        return self.now

    def pass_(self, seconds, waited=0.0):
        self.now += seconds
        self.waited += waited


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_activity, "time", clock)
    return clock


def test_nested_activities_do_not_count_twice(clock):
    activity = Activity(clock)
    activity.begin()
    clock.pass_(1)
    with activity.doing(COMPUTING):
        clock.pass_(2)
        with activity.doing(COMPILING):
            clock.pass_(4)
        clock.pass_(8)
    clock.pass_(16)
    found = activity.end()
    assert (found.other, found.computing, found.compiling) == (17, 10, 4)
    assert sum(found) == 31


def test_waiting_for_others_is_waiting_wherever_it_happens(clock):
    activity = Activity(clock)
    activity.begin()
    with activity.doing(EXCHANGING):
        clock.pass_(5, waited=3)
    clock.pass_(4, waited=1)  # a meeting, say
    found = activity.end()
    assert (found.exchanging, found.waiting, found.other) == (2, 4, 3)


def test_time_between_two_messages_counts_as_busy(clock):
    """The script's own code between two steps keeps the others waiting as any other."""
    activity = Activity(clock)
    for between in (0, 50):
        activity.begin()
        activity.turn(INPUT)
        clock.pass_(1)
        activity.turn(COMPUTING)
        clock.pass_(10)
        activity.turn(EXCHANGING)
        result = activity.of_workers([10.0, 7.0, math.nan])
        assert result == (1, [10, 7, 0], [11 + between, 8 + between, 1 + between])
        clock.pass_(5, waited=4)
        activity.turn(OTHER)
        activity.end()
        clock.pass_(50)


class SlowRows:
    """Rows that are not there before a step waits for them, however slow the machine is."""

    program = None

    def __init__(self):
        self.lock = threading.Lock()  # which cannot be copied, so one thread reads

    def __len__(self):
        return 64

    def __getitem__(self, index):
        while self.program and self.program._parts.activity.now != INPUT:
            time.sleep(1e-4)
        time.sleep(4e-3)
        return {"x": np.float32(index)}


def test_a_step_that_waits_for_its_input_says_so(monkeypatch):
    passed, clock = [0.0], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + passed[0])

    def decide(observation):
        passed[0] += 1000.0

    def driver(state, batch):
        mean = comm.all_reduce(batch["x"].mean())
        hook("slow", Recorder(decide), (mean,), every=2)
        return state + mean, {"mean": mean, "rows": jnp.zeros(3), "of": {"two": mean}}

    rows = SlowRows()
    with ad.Program(driver, 0.0, rows, global_batch=8, world=LocalWorld(2), resizable=False) as program:
        rows.program, events = program, []
        program.subscribe(events.append)
        reports = [program.step() for _ in range(8)]
        rows.program = None
    for report in reports:
        assert sum(report.breakdown) == report.seconds
        assert min(report.breakdown) >= 0
        assert report.examples_per_second == 8 / report.seconds
    assert reports[0].breakdown.compiling > 0
    for report in reports[1:]:
        assert report.breakdown.compiling == 0
        assert report.breakdown.input > 8 * 4e-3
    assert [report.breakdown.hooks >= 1000 for report in reports] == [False, True] * 4
    assert [report.epoch_ended for report in reports] == [False] * 7 + [True]
    for event in events:
        assert event.scalars.keys() == {"mean", "of.two"}
        assert event.scalars["mean"] == float(event.report.metrics["mean"])
        assert event.workers.input.tolist() == [pytest.approx(event.report.breakdown.input, rel=1e-3)] * 2
        assert event.workers.computing == pytest.approx(event.report.compute_seconds, rel=1e-3)
        assert (event.workers.busy >= event.workers.computing).all()


def test_who_was_busy_for_less_has_waited_for_longer():
    busy, none = np.float32([0.3, 0.1, 0.2, 0.0]), np.zeros(4, np.float32)
    found = WorkerSeconds.measured(none, none, busy, range(1, 3), waited=0.15)
    np.testing.assert_allclose(found.waiting, [0.05, 0.25, 0.15, 0], rtol=1e-6)
    alone = WorkerSeconds.measured(none, none, busy, range(1, 3), waited=0.0)  # another one had no messages to wait in
    np.testing.assert_allclose(alone.waiting, [0, 0.2, 0.1, 0], rtol=1e-6)
