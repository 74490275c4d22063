"""What the worlds of a process show of their operations, and how long a reader sees them wait."""

from __future__ import annotations

import time

import pytest

from launchers.activity import (
    INSIDE,
    LEFT,
    OUTSIDE,
    PATIENT,
    RECENT,
    WORLDS,
    ActivityRecord,
    WorldActivity,
    percentile,
)
from tests.speed import limit


def test_what_a_world_does_is_read():
    record, _ = ActivityRecord.create()
    one = record.new_activity()
    assert record.read() == []  # not watched yet
    one.watch(7, survives=True, hang_timeout=None)
    one.begin("message 1 of step 3", time.perf_counter() - 2.0)
    (found,) = record.read()
    assert (found.group, found.survives, found.hang_timeout, found.phase) == (7, True, None, INSIDE)
    assert (found.begun, found.about, found.usual) == (1, "message 1 of step 3", None)
    assert 2.0 <= found.seconds < limit(10)
    one.phase = OUTSIDE
    other = record.new_activity()
    other.watch(8, survives=False, hang_timeout=2.5)
    other.begin("the end", 0.0, PATIENT)
    assert [(r.group, r.hang_timeout, r.phase) for r in record.read()] == [(7, None, OUTSIDE), (8, 2.5, PATIENT)]
    other.group = 0  # it is closed
    one.leave("its script is over")
    (found,) = record.read()
    assert (found.phase, found.about, one.about) == (LEFT, "its script is over", "its script is over")


def test_worlds_that_find_no_room_are_not_watched():
    record, _ = ActivityRecord.create()
    for group in range(1, 2 * WORLDS):
        record.new_activity().watch(group, survives=False, hang_timeout=None)
    assert len(record.read()) == WORLDS
    WorldActivity().begin("x" * 1000, 0.0)  # longer than there is room for


def test_the_usual_time_of_an_operation_is_that_of_its_group():
    record, _ = ActivityRecord.create()
    world = record.new_activity()
    for number in range(2 * RECENT):
        if number == 2 * RECENT - 100:
            world.watch(7, survives=False, hang_timeout=None)
        world.begin("", number * (10.0 if number < 2 * RECENT - 100 else 0.25))
    assert record.read()[0].usual == pytest.approx(0.25)
    assert percentile([0.0] * 50) is None
    assert percentile([float(n) for n in range(100)] + [500.0]) == 1.0
