"""What the machine has left, against counters and control groups of our own making."""

from __future__ import annotations

import math

import numpy as np
import psutil
import pytest

import monitors as mon
from monitors import _machine
from monitors._machine import CpuShare, CpuTimes, Paced

from .lockstep import graph, operators, reading

TWO = frozenset({0, 1})


def share(*readings):
    """The share read after each counter but the first."""
    counters = iter(readings)
    meter = CpuShare(lambda: next(counters))
    return [meter() for _ in readings[1:]]


# --- processor --------------------------------------------------------------------------------------------------------


def test_cores_used_by_others_are_not_available():
    start = CpuTimes(TWO, total=100, idle=50, own=10)
    assert share(start, CpuTimes(TWO, 102, 52, 10)) == [1.0]  # idle
    assert share(start, CpuTimes(TWO, 102, 50, 12)) == [1.0]  # all ours
    assert share(start, CpuTimes(TWO, 102, 51, 10)) == [0.5]  # one of two cores is another's
    assert share(start, CpuTimes(TWO, 102, 50, 10.5)) == [0.25]
    assert share(start, CpuTimes(TWO, 102, 50, 12.1)) == [1.0]  # ticks are coarser than our own clock


def test_counters_that_cannot_be_compared_are_not():
    start, later = CpuTimes(TWO, 100, 50, 10), CpuTimes(TWO, 102, 51, 10)
    assert math.isnan(share(start, start)[0])  # no time has passed
    assert share(start, later, later) == [0.5, 0.5]
    moved = CpuTimes(frozenset({0}), 60, 20, 10)
    assert share(start, later, moved, moved._replace(total=61, idle=21)) == [0.5, 0.5, 1.0]


def test_counters_are_of_the_cores_that_may_be_used(monkeypatch):
    class Row(tuple):
        user, idle, iowait, guest = 10.0, 5.0, 1.0, 4.0

    rows = [Row((10.0, 5.0, 1.0, 4.0))] * 4  # a guest's time is in the user's as well
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: rows)
    monkeypatch.setattr(_machine, "allowed_cpus", lambda: frozenset({1, 3}))
    found = _machine.cpu_times()
    assert (found.cores, found.total, found.idle) == (frozenset({1, 3}), 32.0, 12.0)
    monkeypatch.setattr(_machine, "allowed_cpus", lambda: frozenset({1, 9}))  # some are offline
    assert _machine.cpu_times().cores == frozenset(range(4))


def test_measurements_are_paced(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(_machine.time, "monotonic", lambda: now[0])
    values = iter([1.0, 2.0, 3.0])
    paced = Paced(lambda: next(values), first=math.nan, due=100.05)
    assert math.isnan(paced())
    found = []
    for now[0] in (100.06, 100.10, 100.17, 100.17, 200.0):
        found.append(paced())
    assert found == [1.0, 1.0, 2.0, 2.0, 3.0]


# --- operators --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpu_available", "memory_available"])
def test_they_are_sources_and_not_measured_outside_a_program(name):
    monitor = getattr(mon, name)
    assert operators(graph(monitor)) == [f"source {name}"]
    assert np.isnan(monitor())
    assert monitor().dtype == np.float32


def test_the_processor_is_watched_from_when_the_driver_is_traced(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(_machine.time, "monotonic", lambda: now[0])
    counters = iter([CpuTimes(TWO, 100, 50, 10), CpuTimes(TWO, 102, 51, 10)])
    monkeypatch.setattr(_machine, "CpuShare", lambda: CpuShare(lambda: next(counters)))
    _machine._cpu_share.cache_clear()
    try:
        graph(mon.cpu_available)
        now[0] = 0.2
        assert _machine.CPU_AVAILABLE.read(reading()) == 0.5
    finally:
        _machine._cpu_share.cache_clear()
