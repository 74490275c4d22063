"""Seconds of a computation without those of other processes, also where the processor's clock has long steps."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from adaptive.runtime import stopwatch
from tests.mpirun import ROOT
from tests.speed import limit


@pytest.fixture
def clock(monkeypatch):
    """Clocks that stand still until they are set; the processor's clock has steps of a nanosecond."""
    now = {"passed": 7.0, "computed": 3.0}
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now["passed"])
    monkeypatch.setattr(stopwatch.time, "process_time", lambda: now["computed"])
    monkeypatch.setattr(stopwatch, "clock_step", lambda: 1e-9)
    return now


@pytest.mark.parametrize(
    ("platform", "passed", "computed", "seconds"),
    [
        ("cpu", 0.008, 0.004, 0.004),  # a neighbor had the core for half of it
        ("cpu", 0.004, 0.007, 0.004),  # two threads computed
        ("gpu", 0.008, 0.001, 0.008),  # it was the device that computed
    ],
)
def test_timings_subtract_the_other_processes_of_the_cores(clock, platform, passed, computed, seconds):
    watch = stopwatch.Stopwatch(SimpleNamespace(platform=platform))
    clock |= {"passed": 7.0 + passed, "computed": 3.0 + computed}
    assert watch.seconds == pytest.approx(seconds)


def test_a_few_steps_of_the_clock_are_not_taken_for_a_time(monkeypatch):
    monkeypatch.setattr(stopwatch, "clock_step", lambda: 0.004)
    assert stopwatch.undisturbed(0.001, 0.0) == 0.001
    assert stopwatch.undisturbed(0.015, 0.012) == 0.015
    assert stopwatch.undisturbed(0.100, 0.048) == 0.048


@pytest.mark.parametrize(("ticks", "step"), [(1, 0.01), (300, 0.01), (10**9, float("inf"))])
def test_the_step_of_the_clock(monkeypatch, ticks, step):
    """The clock advances by 10 ms at every so many looks; the first time after half as many."""
    looks = iter(range(ticks // 2, 10**9))
    monkeypatch.setattr(stopwatch.time, "process_time", lambda: next(looks) // ticks * 0.01)
    assert stopwatch.clock_step.__wrapped__() == pytest.approx(step)


SCRIPT = """
import resource

resource.setrlimit(resource.RLIMIT_CPU, (500, resource.RLIM_INFINITY))
import jax.numpy as jnp, numpy as np
import adaptive as ad, collectives as comm

def driver(w, batch):
    return w - 0.1 * comm.all_reduce(batch.mean()), {}

with ad.Program(driver, jnp.zeros(()), np.ones(1024, np.float32), global_batch=48) as program:
    program.warm_up()
    for size in (48, 40, 24):
        program.rescale(global_batch=size)
        assert len(list(program.run(steps=40))) == 40
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a limit does not change the clock")
def test_a_program_trains_with_a_limit_of_processor_time():
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=limit(100))
    assert done.returncode == 0, done.stderr
