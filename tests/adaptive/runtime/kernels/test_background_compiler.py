"""The thread that compiles in the background, and the pauses in which steps can be measured."""

from __future__ import annotations

import threading

import pytest

from adaptive.runtime.kernels import background_compiler as _background
from adaptive.runtime.kernels.background_compiler import QUIET_STEPS, BackgroundCompiler
from tests.speed import limit

DEADLINE = limit(60)


class Compiles:
    """Compiles a size when the test allows it, and notes which."""

    def __init__(self):
        self.compiled: list[int] = []
        self.began, self.may_end, self.ended = (threading.Semaphore(0) for _ in range(3))

    def compile(self, local, size):
        self.began.release()
        assert self.may_end.acquire(timeout=DEADLINE)
        self.compiled.append(size)
        self.ended.release()


@pytest.fixture
def owner():
    return Compiles()


@pytest.fixture
def compiler(owner, monkeypatch):
    monkeypatch.setattr(_background, "_FIRST_PAUSE", DEADLINE)
    compiler = BackgroundCompiler(owner, pauses=True)
    yield compiler
    owner.may_end.release(10)
    compiler.close()


def happens(semaphore):
    assert semaphore.acquire(timeout=DEADLINE)


def waits_for_steps(compiler):
    """Return when the thread has come to a pause."""
    patience = threading.Event()
    while not compiler._pausing:  # no event says so
        patience.wait(0.001)


def has_ended(compiler):
    patience = threading.Event()
    while not compiler.idle:
        patience.wait(0.001)


def test_some_steps_pass_alone_before_a_kernel_is_compiled(owner, compiler):
    compiler.put(0, 8)
    waits_for_steps(compiler)
    for _ in range(QUIET_STEPS - 1):
        assert not compiler.step_ended()
    assert not owner.began.acquire(blocking=False)
    assert not compiler.step_ended()
    happens(owner.began)


def test_a_step_is_beside_the_compiler_from_where_it_begins_to_where_it_ends(owner, compiler):
    compiler._longest_pause = 0.0
    compiler.put(0, 8)
    happens(owner.began)
    assert [compiler.step_ended() for _ in range(3)] == [True, True, True]
    owner.may_end.release()
    has_ended(compiler)
    assert compiler.step_ended()  # it began beside it
    assert not compiler.step_ended()


def test_a_compile_within_one_step_counts(owner, compiler):
    owner.may_end.release()
    compiler._longest_pause = 0.0
    compiler.put(0, 8)
    has_ended(compiler)
    assert owner.compiled == [8]
    assert [compiler.step_ended() for _ in range(2)] == [True, False]


def test_a_compilation_that_was_waited_for_does_not_count_as_beside_a_step(owner, compiler):
    owner.may_end.release()
    with compiler.without_pauses():
        compiler.put(0, 8)
        has_ended(compiler)
    assert not compiler.step_ended()


def test_a_step_that_began_beside_a_compiler_does_not_count(owner, compiler):
    compiler._longest_pause = 0.0
    compiler.put(0, 8)
    happens(owner.began)
    assert compiler.step_ended()
    owner.may_end.release()
    has_ended(compiler)
    compiler._longest_pause = DEADLINE
    compiler.put(0, 4)
    waits_for_steps(compiler)
    assert compiler.step_ended()
    for _ in range(QUIET_STEPS - 1):
        assert not compiler.step_ended()
    assert not owner.began.acquire(blocking=False)
    assert not compiler.step_ended()
    happens(owner.began)


def test_a_pause_lasts_no_longer_than_the_compile_before_it(owner, compiler):
    owner.may_end.release(2)
    compiler._longest_pause = 0.0
    compiler.put(0, 8)
    compiler.put(0, 4)  # no step is ever taken
    happens(owner.ended)
    happens(owner.ended)


def test_without_steps_the_compiler_does_not_pause(owner, compiler):
    owner.may_end.release(3)
    compiler._longest_pause = 0.0
    compiler.put(0, 8)
    has_ended(compiler)
    compiler._longest_pause = DEADLINE
    compiler.put(0, 4)
    happens(owner.ended)
    happens(owner.ended)
    assert owner.compiled == [8, 4]


def test_waiting_for_kernels_ends_a_pause(owner, compiler):
    owner.may_end.release(2)
    compiler.put(0, 8)
    waits_for_steps(compiler)
    compiler.put(0, 4)
    with compiler.without_pauses():
        happens(owner.ended)
        happens(owner.ended)
    assert owner.compiled == [8, 4]


def test_an_urgent_task_during_a_pause_goes_first(owner, compiler):
    owner.may_end.release(2)
    compiler.put(0, 8)
    waits_for_steps(compiler)
    compiler.put(0, 4, urgent=True)
    with compiler.without_pauses():
        happens(owner.ended)
        happens(owner.ended)
    assert owner.compiled == [4, 8]


def test_without_pauses_a_compile_begins_at_once(owner):
    owner.may_end.release()
    compiler = BackgroundCompiler(owner)
    compiler.put(0, 8)
    happens(owner.ended)
    compiler.close()


def test_closing_ends_a_pause(owner, compiler):
    compiler.put(0, 8)
    waits_for_steps(compiler)
    compiler.close()
    compiler._thread.join(DEADLINE)
    assert not compiler._thread.is_alive()
    assert owner.compiled == []
