"""Signals that end this process: they are recorded, and earlier handlers return."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

import pytest

from adaptive.base.process import signals
from adaptive.base.process.signals import SignalHandlers
from tests.speed import limit


@pytest.fixture(autouse=True)
def undisturbed():
    """Remove signals and handlers after each test."""
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    yield
    signals.acknowledge_termination()
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before


def test_the_first_signal_is_pending_until_it_is_acknowledged():
    with SignalHandlers():
        assert signals.pending_termination() is None
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        heard = signals.pending_termination()
        assert heard is not None
        assert heard.signal == "SIGUSR1"
        assert heard.seconds >= 0
    assert signals.pending_termination() == heard  # not lost behind the block
    signals.acknowledge_termination()
    assert signals.pending_termination() is None


def test_a_handler_that_was_there_is_called_too_and_put_back():
    called = []

    def handler(number, frame):
        called.append(number)

    signal.signal(signal.SIGTERM, handler)
    try:
        with SignalHandlers(), SignalHandlers():
            signal.raise_signal(signal.SIGTERM)
            assert signals.pending_termination() is not None
        assert signal.getsignal(signal.SIGTERM) is handler
        signal.raise_signal(signal.SIGTERM)
        assert called == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_handler_that_somebody_puts_there_meanwhile_stays():
    mine = lambda number, frame: None  # noqa: E731
    try:
        with SignalHandlers():
            signal.signal(signal.SIGUSR1, mine)
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with SignalHandlers():
            signal.raise_signal(signal.SIGUSR1)
            assert signals.pending_termination() is None
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def wait_for_ever(ready):
    ready.send(os.getpid())
    threading.Event().wait()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")  # JAX and Python warn of forks
def test_a_forked_child_has_the_default_handlers():
    here, there = multiprocessing.Pipe()
    with SignalHandlers():
        child = multiprocessing.get_context("fork").Process(target=wait_for_ever, args=(there,))
        child.start()
        assert here.poll(limit(30))
        child.terminate()
        child.join(limit(30))
        assert child.exitcode == -signal.SIGTERM
        assert signals.pending_termination() is None
