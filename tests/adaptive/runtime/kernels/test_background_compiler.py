"""The thread that compiles in the background: in which order, beside which steps, and with which pauses."""

from __future__ import annotations

import threading

import pytest

from adaptive.runtime.kernels import background_compiler as _background
from adaptive.runtime.kernels.background_compiler import QUIET_STEPS, BackgroundCompiler, KernelJob
from tests.speed import limit

DEADLINE = limit(60)
FIRST, SECOND, THIRD = (KernelJob(0, size) for size in (8, 4, 2))


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
    compiler = BackgroundCompiler(owner)
    yield compiler
    owner.may_end.release(10)
    compiler.close()
    compiler._thread.join(DEADLINE)


def ends(compiler):
    patience = threading.Event()
    for _ in range(int(DEADLINE * 1000)):
        if compiler.idle:
            return
        patience.wait(0.001)
    raise AssertionError("not in time")


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
    assert compiler.step_ended()  # it began beside it
    assert not compiler.step_ended()


def test_a_compile_within_one_step_counts(owner, compiler):
    owner.may_end.release()
    compiler.put(FIRST)
    ends(compiler)
    assert [compiler.step_ended() for _ in range(2)] == [True, False]


# --- pauses, in which steps are measured ------------------------------------------------------------------------------


@pytest.fixture
def pausing(owner, monkeypatch):
    monkeypatch.setattr(_background, "_FIRST_PAUSE", DEADLINE)
    compiler = BackgroundCompiler(owner, pauses=True)
    yield compiler
    owner.may_end.release(10)
    compiler.close()
    compiler._thread.join(DEADLINE)
    assert not compiler._thread.is_alive()  # a pause ends too


def waits_for_steps(compiler):
    """Return when the thread has come to a pause."""
    patience = threading.Event()
    for _ in range(int(DEADLINE * 1000)):
        if compiler._pausing:
            return
        patience.wait(0.001)
    raise AssertionError("not in time")


def test_some_steps_pass_alone_before_a_job_begins(owner, pausing):
    pausing.put(FIRST)
    waits_for_steps(pausing)
    for _ in range(QUIET_STEPS - 1):
        assert not pausing.step_ended()
    assert not owner.began.acquire(blocking=False)
    assert not pausing.step_ended()
    assert owner.began.acquire(timeout=DEADLINE)


def test_a_step_that_began_beside_the_compiler_does_not_count(owner, pausing):
    pausing._longest_pause = 0.0
    pausing.put(FIRST)
    assert owner.began.acquire(timeout=DEADLINE)
    assert pausing.step_ended()
    owner.may_end.release()
    ends(pausing)
    pausing._longest_pause = DEADLINE
    pausing.put(SECOND)
    waits_for_steps(pausing)
    assert pausing.step_ended()
    for _ in range(QUIET_STEPS - 1):
        assert not pausing.step_ended()
    assert not owner.began.acquire(blocking=False)
    assert not pausing.step_ended()
    assert owner.began.acquire(timeout=DEADLINE)


def test_a_pause_lasts_no_longer_than_the_job_before_and_needs_steps(owner, pausing):
    owner.may_end.release(3)
    pausing._longest_pause = 0.0
    pausing.put(FIRST)
    pausing.put(SECOND)  # no step is ever taken
    ends(pausing)
    pausing._longest_pause = DEADLINE
    pausing.put(THIRD)
    ends(pausing)
    assert owner.done == [FIRST, SECOND, THIRD]


def test_waiting_for_kernels_ends_a_pause_and_urgent_jobs_still_go_first(owner, pausing):
    owner.may_end.release(2)
    pausing.put(FIRST)
    waits_for_steps(pausing)
    pausing.put(SECOND, urgent=True)
    with pausing.without_pauses():
        ends(pausing)
    assert owner.done == [SECOND, FIRST]
    assert not pausing.step_ended()  # it disturbed no step
