"""Threads for user code: results, errors, ends that wait for nothing, and the deadline of a read."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

import adaptive as ad
from adaptive.base.waits import wait_of
from adaptive.data.fetch_thread import DaemonThreads
from adaptive.data.shards import stream_of
from adaptive.data.stream import Stream
from tests.speed import limit

COVERS = ("adaptive/base/python_stacks.py", "adaptive/base/waits.py")

ROOT = Path(__file__).resolve().parents[3]


def test_tasks_run_in_turn_and_give_results_or_raise():
    thread = DaemonThreads()
    seen = []
    results = [thread.submit(lambda i=i: seen.append(i) or i * i) for i in range(10)]
    failed = thread.submit(int, "no number")
    assert [future.result(limit(10)) for future in results] == [i * i for i in range(10)]
    assert seen == list(range(10))
    with pytest.raises(ValueError, match="no number"):
        failed.result(limit(10))
    assert thread.submit(threading.get_ident).result(limit(10)) != threading.get_ident()


def test_pending_tasks_can_be_canceled_and_running_ones_not():
    thread, begun, go_on, seen = DaemonThreads(), threading.Event(), threading.Event(), []
    hangs = thread.submit(lambda: begun.set() or go_on.wait(limit(60)))
    canceled, last = thread.submit(seen.append, 1), thread.submit(seen.append, 2)
    assert begun.wait(limit(10))
    assert not hangs.cancel()
    assert canceled.cancel()
    go_on.set()
    last.result(limit(10))
    assert seen == [2]


def test_the_thread_ends_with_its_owner_and_holds_no_task():
    class Owner:
        def __init__(self):
            self.thread = DaemonThreads()

        def read(self):
            return [1]

    owner = Owner()
    owner.thread.submit(owner.read).result(limit(10))
    running, alive = owner.thread._threads[0], weakref.ref(owner)
    owner.thread.submit(int).result(limit(10))  # the thread is done with the task before
    del owner
    gc.collect()
    assert alive() is None
    running.join(limit(10))
    assert not running.is_alive()


FORKS = """
import multiprocessing
from adaptive.data.fetch_thread import DaemonThreads

def fork():
    process = multiprocessing.get_context("fork").Process(target=int)  # as PyTorch's loaders begin their workers
    process.start()
    process.join()
    return process.exitcode

thread = DaemonThreads()
print([thread.submit(fork).result() for _ in range(2)])
"""
HANGS = """
import threading
from adaptive.data.fetch_thread import DaemonThreads

thread, begun = DaemonThreads(), threading.Event()
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


# --- the deadline -----------------------------------------------------------------------------------------------------


class Hanging:
    """A source that hangs at one index, until the test ends."""

    def __init__(self, index=None):
        self.index, self.ends = index, threading.Event()

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == self.index:
            self.hangs()
        return {"i": np.int32(index)}

    def hangs(self):
        self.ends.wait(limit(120))


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_read_that_hangs_ends_with_an_error_that_names_the_example(ahead, num_threads):
    source = Hanging()
    stream = Stream(ad.data.from_source(source, num_threads=num_threads, read_timeout=0.2), seed=0, workers=range(1))
    source.index = int(stream.indices(6, 1)[0])
    stream.take((4,))
    if ahead:
        stream.prefetch((4,))
    stream.advance((4,))
    with pytest.raises(ad.DataError, match=f"the limit of a read: waiting for example {source.index} of the") as error:
        stream.take((4,))
    assert "read_timeout= of ad.data.from_source" in str(error.value)
    assert ("in hangs" in str(error.value)) == (num_threads == 1)
    source.ends.set()
    stream.close()


def test_an_iterator_that_hangs_ends_with_an_error_too():
    ends = threading.Event()

    def rows():
        for i in itertools.count():
            if i == 6:
                ends.wait(limit(120))
            yield {"i": np.int32(i)}

    data = ad.data.from_iterator(rows, read_timeout=0.2, length=100)
    stream = Stream(stream_of(data, 1, range(1)), seed=0, workers=range(1))
    stream.take((4,))
    stream.advance((4,))
    with pytest.raises(ad.DataError, match="example 6 of the iterator"):
        stream.take((4,))
    ends.set()
    stream.close()


def test_the_deadline_is_of_each_read_and_not_of_the_batch():
    class Slow(Hanging):
        def __getitem__(self, index):
            self.ends.wait(0.03)
            return {"i": np.int32(index)}

    stream = Stream(ad.data.from_source(Slow(), read_timeout=limit(0.3)), seed=0, workers=range(1))
    assert len(stream.take((24,)).batches[0]["i"]) == 24
    stream.close()


def test_what_a_thread_waits_for_is_recorded_for_the_watchdog():
    source = Hanging()
    stream = Stream(ad.data.from_source(source), seed=0, workers=range(1))
    source.index = int(stream.indices(2, 1)[0])
    waits = threading.Thread(target=stream.take, args=((4,),))
    waits.start()
    found = None
    for _ in range(int(limit(10) / 0.01)):
        found = wait_of(waits.ident)
        if found is not None and f"example {source.index} " in found.words():
            break
        waits.join(0.01)
    assert f"waiting for example {source.index} of the data (by thread adaptive-input" in found.words()
    assert "in hangs" in found.stack()
    source.ends.set()
    waits.join(limit(10))
    stream.close()


@pytest.mark.parametrize("seconds", [-1, float("nan"), "soon"])
def test_a_deadline_that_is_none_is_refused(seconds):
    for call in (
        lambda: ad.data.from_source(Hanging(), read_timeout=seconds),
        lambda: ad.data.from_iterator(list, read_timeout=seconds),
    ):
        with pytest.raises(ad.DataError, match="read_timeout="):
            call()
