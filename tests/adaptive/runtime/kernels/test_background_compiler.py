"""The thread that compiles in the background: in which order, beside which steps, and with which pauses."""

from __future__ import annotations

import itertools
import platform
import threading
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from adaptive.runtime.kernels import background_compiler as _background
from adaptive.runtime.kernels.background_compiler import (
    QUIET_STEPS,
    BackgroundCompiler,
    KernelJob,
    return_freed_memory,
)
from tests.speed import limit

DEADLINE = limit(60)
FIRST, SECOND, THIRD = (KernelJob(0, size) for size in (8, 4, 2))
ASKED = KernelJob(0, 7)


class Compiles:
    """Carries out a job when the test allows it, and notes which."""

    def __init__(self):
        self.done = []
        self.began, self.may_end = threading.Semaphore(0), threading.Semaphore(0)

    def carry_out(self, job):
        self.began.release()
        assert self.may_end.acquire(timeout=DEADLINE)
        self.done.append(job)


@pytest.fixture
def owner():
    return Compiles()


@pytest.fixture
def compiler(owner):
    yield from ends_in_the_end(owner, BackgroundCompiler(owner))


@pytest.fixture
def pausing(owner, monkeypatch):
    """A compiler whose pauses end with steps, because each compile seems to take a thousand seconds."""
    seconds = itertools.count(step=1000)
    monkeypatch.setattr(_background, "_FIRST_PAUSE", DEADLINE)
    monkeypatch.setattr(_background, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    yield from ends_in_the_end(owner, BackgroundCompiler(owner, pauses=True))


def ends_in_the_end(owner, compiler):
    yield compiler
    owner.may_end.release(10)
    compiler.close()
    compiler._thread.join(DEADLINE)
    assert not compiler._thread.is_alive()  # a pause ends too


def ends(compiler):
    patience = threading.Event()
    for _ in range(int(DEADLINE * 1000)):
        if compiler.idle:
            return
        patience.wait(0.001)
    raise AssertionError("not in time")


def steps_until_a_job_begins(owner, compiler):
    """Take steps until a job begins; return for each whether something was compiled during it."""
    beside = []
    while not owner.began.acquire(timeout=0.01):  # the thread may need some time to notice a step
        beside.append(compiler.step_ended())
        assert len(beside) < 300
    return beside


def test_urgent_jobs_go_first_and_dropped_ones_are_not_done(owner, compiler):
    compiler.put(FIRST)
    assert owner.began.acquire(timeout=DEADLINE)
    for job in (SECOND, THIRD, KernelJob(1, 2)):
        compiler.put(job)
    compiler.put(THIRD, urgent=True)
    compiler.drop(KernelJob(1, 2))
    assert set(compiler.unfinished()) == {FIRST, SECOND, THIRD}
    owner.may_end.release(3)
    ends(compiler)
    assert owner.done == [FIRST, THIRD, SECOND]


def test_a_step_is_beside_the_compiler_from_where_it_begins_to_where_it_ends(owner, compiler):
    compiler.put(FIRST)
    assert owner.began.acquire(timeout=DEADLINE)
    assert [compiler.step_ended() for _ in range(3)] == [True, True, True]
    owner.may_end.release()
    ends(compiler)
    assert [compiler.step_ended() for _ in range(2)] == [True, False]  # one began beside it
    owner.may_end.release()
    compiler.put(SECOND)  # within one step
    ends(compiler)
    assert [compiler.step_ended() for _ in range(2)] == [True, False]


# --- pauses, in which steps are measured ------------------------------------------------------------------------------


def test_some_undisturbed_steps_pass_before_each_job(owner, pausing):
    pausing.put(FIRST)
    steps = steps_until_a_job_begins(owner, pausing)
    assert len(steps) >= QUIET_STEPS
    assert not any(steps)
    pausing.put(SECOND)
    assert pausing.step_ended()
    owner.may_end.release()
    steps = steps_until_a_job_begins(owner, pausing)
    assert steps[0]  # it began beside the compiler
    assert len(steps) - sum(steps) >= QUIET_STEPS


def test_what_is_asked_for_begins_after_a_few_steps_however_long_compiles_take_and_whatever_waits(owner, pausing):
    """A pause as long as the last compile would delay the first new size of a short run by hundreds of steps."""
    for job in (FIRST, SECOND, THIRD):
        pausing.put(job)
    steps_until_a_job_begins(owner, pausing)
    pausing.step_ended()
    pausing.put(ASKED, urgent=True)
    owner.may_end.release()
    steps_until_a_job_begins(owner, pausing)
    assert set(pausing.unfinished()) == {ASKED, SECOND, THIRD}
    owner.may_end.release()
    steps_until_a_job_begins(owner, pausing)
    assert owner.done == [FIRST, ASKED]


def test_a_pause_lasts_no_longer_than_the_job_before_and_needs_steps(owner, pausing):
    owner.may_end.release(3)
    pausing._longest_pause = 0.0
    pausing.put(FIRST)
    pausing.put(SECOND)  # no step is ever taken
    ends(pausing)
    pausing.put(THIRD)
    ends(pausing)
    assert owner.done == [FIRST, SECOND, THIRD]


def test_waiting_for_kernels_ends_a_pause_and_urgent_jobs_still_go_first(owner, pausing):
    owner.may_end.release(2)
    pausing.put(FIRST)
    pausing.put(SECOND, urgent=True)
    pausing.finish()
    assert owner.done == [SECOND, FIRST]
    assert not pausing.step_ended()  # it disturbed no step


# --- freed memory -----------------------------------------------------------------------------------------------------


def resident():
    return psutil.Process().memory_info().rss


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc returns memory when asked")
def test_freed_memory_is_returned():
    """Blocks too small to be mapped one by one, with one in use above them."""
    blocks = [np.ones(1 << 14, np.uint8) for _ in range(8192)]
    used = blocks[-1]
    del blocks
    before = resident()
    return_freed_memory()
    assert before - resident() > 64 << 20
    assert used.all()


def test_the_background_compiler_returns_memory_when_it_has_no_work(monkeypatch, owner, compiler):
    returned = threading.Event()
    monkeypatch.setattr(_background, "_TRIM_AFTER", (0.01,))
    monkeypatch.setattr(_background, "return_freed_memory", returned.set)
    owner.may_end.release()
    compiler.put(FIRST)
    assert returned.wait(limit(30))
    assert compiler.idle
