"""The background thread for user code: results, errors, and ends that wait for nothing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from adaptive.data.fetch_thread import FetchThread
from tests.speed import limit

ROOT = Path(__file__).resolve().parents[3]


def test_tasks_run_in_turn_and_give_results_or_raise():
    thread = FetchThread("reads")
    seen = []
    results = [thread.submit(lambda i=i: seen.append(i) or i * i) for i in range(10)]
    failed = thread.submit(int, "no number")
    assert [future.result(limit(10)) for future in results] == [i * i for i in range(10)]
    assert seen == list(range(10))
    with pytest.raises(ValueError, match="no number"):
        failed.result(limit(10))
    assert thread.submit(threading.get_ident).result(limit(10)) == thread.ident != threading.get_ident()
    thread.close()


def test_pending_tasks_are_canceled_and_close_does_not_wait():
    thread, begun, go_on, seen = FetchThread("reads"), threading.Event(), threading.Event(), []
    hangs = thread.submit(lambda: begun.set() or go_on.wait(limit(60)))
    cancelled, last = thread.submit(seen.append, 1), thread.submit(seen.append, 2)
    assert begun.wait(limit(10))
    assert not hangs.cancel()
    assert cancelled.cancel()
    thread.close()
    thread.close()
    with pytest.raises(RuntimeError, match="closed"):
        thread.submit(int)
    go_on.set()
    last.result(limit(10))
    assert seen == [2]
    thread._thread.join(limit(10))
    assert not thread._thread.is_alive()


def test_the_thread_ends_with_its_owner_and_holds_no_task():
    class Owner:
        def __init__(self):
            self.thread = FetchThread("reads")

        def read(self):
            return [1]

    owner = Owner()
    owner.thread.submit(owner.read).result(limit(10))
    running, alive = owner.thread._thread, weakref.ref(owner)
    owner.thread.submit(int).result(limit(10))  # the thread is done with the task before
    del owner
    gc.collect()
    assert alive() is None
    running.join(limit(10))
    assert not running.is_alive()


FORKS = """
import multiprocessing
from adaptive.data.fetch_thread import FetchThread

def fork():
    process = multiprocessing.get_context("fork").Process(target=int)  # as PyTorch's loaders begin their workers
    process.start()
    process.join()
    return process.exitcode

thread = FetchThread("reads")
print([thread.submit(fork).result() for _ in range(2)])
"""
HANGS = """
import threading
from adaptive.data.fetch_thread import FetchThread

thread, begun = FetchThread("reads"), threading.Event()
thread.submit(lambda: begun.set() or threading.Event().wait())
thread.submit(print, "nobody waits for this")
begun.wait()
print("over")
"""


@pytest.mark.parametrize(("script", "printed"), [(FORKS, "[0, 0]"), (HANGS, "over")], ids=["forks", "hangs"])
def test_a_process_ends_while_a_task_runs(script, printed):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit(60))
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, printed, "")
