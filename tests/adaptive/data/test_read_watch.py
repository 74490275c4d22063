"""Reads that hang: warnings, the error, and that nothing else waits for them."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import adaptive as ad
import collectives as comm
from adaptive.base.waits import wait_of
from adaptive.base.world_members import Loss
from adaptive.data import read_watch
from adaptive.data.background_rows import in_background
from adaptive.data.fetch_thread import FetchThread
from adaptive.data.read_watch import CurrentRead, ReadWatch
from adaptive.data.shards import stream_of
from adaptive.data.stream import Stream
from tests.speed import Deadline, limit

COVERS = ("adaptive/base/python_stacks.py", "adaptive/base/waits.py", "adaptive/data/background_rows.py")

ROOT = Path(__file__).resolve().parents[3]
PATIENT = SimpleNamespace(hang_timeout=0.4, processes=2, rank=1, losses=())  # as much of a world as is asked


class Hangs:
    """Examples of which number 13 cannot be read until the event is set."""

    def __init__(self):
        self.go_on, self.longest = threading.Event(), limit(100)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 13:
            self.waits_for_the_disk()
        return {"i": index}

    def waits_for_the_disk(self):
        self.go_on.wait(self.longest)


@pytest.fixture
def hangs():
    source = Hangs()
    yield source
    source.go_on.set()


class HangsIfThere(Hangs):
    """The same in another process: until a file is gone."""

    def __init__(self, marker):
        self.marker = marker

    def waits_for_the_disk(self):
        while os.path.exists(self.marker):
            time.sleep(0.01)


def until(condition):
    deadline = Deadline(60)
    while not condition():
        assert deadline.left(), "it does not come to that"
        time.sleep(0.01)


def raises(call, *patterns):
    """Check that a call raises a DataError with these texts, and return the error."""
    with pytest.raises(ad.DataError) as error:
        call()
    text = str(error.value)
    for pattern in patterns:
        assert re.search(pattern, text), text
    return error.value


# --- by a thread ------------------------------------------------------------------------------------------------------


def test_a_read_by_a_thread_is_named_with_its_stack_and_ended(hangs, caplog):
    stream = Stream(ad.data.from_source(hangs), seed=0, workers=range(1), world=PATIENT)
    error = raises(
        lambda: stream.take((40,)),
        rf"^rank 1 \(pid {os.getpid()} on \S+\) has waited \d s, the deadline of a read, for example 13 of the data "
        r"\(by thread adaptive-input, for \d s\)\.\n",
        r"in waits_for_the_disk\n +self\.go_on\.wait",
        r"read_timeout= of ad\.data\.from_source .*1\.5 times the hang_timeout= of comm\.world\(\) by default.*write "
        r"more",
    )
    assert "test_a_read_by_a_thread" not in str(error)  # the stack of the reader alone
    warned = r"has waited \d s for example 13 of the data(.*\n)*.*ends with a DataError after 0\.6 s"
    assert re.search(warned, caplog.text)
    assert wait_of(threading.get_ident()) is None
    hangs.go_on.set()
    assert sorted(stream.take((40,)).batches[0]["i"]) == list(range(40))  # the thread has come back


def test_a_read_that_was_begun_ahead_is_ended_too(hangs):
    stream = Stream(ad.data.from_source(hangs, read_timeout=0.2), seed=0, workers=range(1))
    stream.prefetch((40,))
    stream.cursors = (40,)
    with pytest.raises(ad.DataError, match=r"(?s)^This process .* for example 13 .* write more or 0 for no deadline"):
        stream.take((40,))


def test_one_process_waits_for_a_slow_read_and_warns_repeatedly(hangs, caplog, monkeypatch):
    monkeypatch.setattr(read_watch, "_FIRST_WARNING", 0.1)
    stream, taken = Stream(ad.data.from_source(hangs), seed=0, workers=range(1)), []
    thread = threading.Thread(target=lambda: taken.append(stream.take((40,))), daemon=True)
    thread.start()
    until(lambda: len(caplog.records) >= 3)
    assert all("for example 13 of the data" in record.message for record in caplog.records)
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    assert "No deadline ends this: read_timeout= of ad.data.from_source" in caplog.text
    waits = wait_of(thread.ident)
    assert waits.words().startswith("waiting for example 13 of the data (by thread adaptive-input, for")
    assert "in waits_for_the_disk" in waits.stack()
    hangs.go_on.set()
    thread.join(limit(20))
    assert len(taken) == 1


def test_without_a_deadline_the_next_wait_after_a_loss_has_one(hangs):
    world = SimpleNamespace(**vars(PATIENT))
    stream = Stream(ad.data.from_source(hangs, read_timeout=0), seed=0, workers=range(1), world=world)
    hangs.go_on.set()
    stream.take((40,))
    stream.advance((40,))
    hangs.go_on.clear()
    world.losses = (Loss((2,), "rank 2 (pid 1 on a)", "message 1 of step 2 of program 1", 0.0),)
    raises(
        lambda: stream.take((40,)),
        "for example 13 of the data",
        r"Before, worker 2 lost: rank 2 \(pid 1 on a\) disconnected in message 1 of step 2",
    )


@pytest.mark.parametrize("seconds", [-1, "soon", float("inf"), float("nan")])
def test_a_deadline_that_is_none_is_refused(seconds):
    with pytest.raises(ad.DataError, match=r"read_timeout=.*write the seconds"):
        ad.data.from_source(Hangs(), read_timeout=seconds)
    with pytest.raises(ad.DataError, match=r"read_timeout=.*write the seconds"):
        ad.data.from_iterator(list, read_timeout=seconds)


def test_a_deadline_is_given_once():
    with pytest.raises(ad.DataError, match="read_timeout= in one call"):
        ad.data.from_source(ad.data.from_source(Hangs()), read_timeout=1)


def test_the_deadline_is_of_each_read_and_not_of_the_batch():
    """Data of which another example is read at each look."""
    future, looks = Future(), []

    def look():
        looks.append(1)
        if len(looks) == 40:
            future.set_result("all of them")
        return [CurrentRead(f"example {len(looks)} of the data", "thread adaptive-input", 1.0, lambda: "")]

    data = SimpleNamespace(read_timeout=0.2, current_reads=look, thread=FetchThread("reads"))
    assert ReadWatch(data, None).result(future) == "all of them"
    assert len(looks) == 40


def test_errors_of_the_source_are_its_own():
    class TimesOut(Hangs):
        def waits_for_the_disk(self):
            raise TimeoutError("of the server")

    stream = Stream(ad.data.from_source(TimesOut(), read_timeout=1), seed=0, workers=range(1))
    with pytest.raises(TimeoutError, match="of the server"):
        stream.take((40,))


class HangsAtOnce(Hangs):
    def __init__(self, source):
        self._source = source

    def __getitem__(self, index):
        return self._source[13]


def test_reads_outside_of_steps_are_ended_as_well(hangs):
    rows = in_background(ad.data.from_source(hangs, read_timeout=0.2), None)
    raises(lambda: rows.rows(np.arange(20)), "for example 13 of the data")
    raises(lambda: ad.data.from_source(HangsAtOnce(hangs), read_timeout=0.2), "for example 0 of the data")

    def driver(state, batch):
        return state, {"n": comm.all_reduce(batch["i"].astype(jnp.float32).mean())}

    def mean(state, batch):
        return batch["i"].astype(jnp.float32).mean()

    good, bad = {"i": np.arange(8)}, ad.data.from_source(hangs, read_timeout=0.2)
    with ad.Program(driver, jnp.zeros(()), good, global_batch=8, resizable=False) as program:
        raises(lambda: program.evaluate(mean, bad, batch=20), "for example 13 of the data")
    with ad.Program(driver, jnp.zeros(()), bad, global_batch=40, resizable=False) as program:
        error = raises(program.step, "for example 13 of the data", "in waits_for_the_disk")  # still in the same read
        assert "in step 1" in error.__notes__[0]


# --- by an iterator ---------------------------------------------------------------------------------------------------


def streamed(how, world=None):
    return Stream(stream_of(how, 1, [0], world), seed=0, workers=range(1), world=world)


@pytest.mark.parametrize(
    ("at", "named"),
    [
        (0, "example 0 of the iterator"),
        (5, "example 5 of the iterator"),
        ("epoch", "the start of epoch 0 of the iterator"),
    ],
)
def test_an_iterator_that_hangs(at, named):
    go_on, longest = threading.Event(), limit(100)

    def rows():
        if at == "epoch":
            go_on.wait(longest)

        def examples():
            for i in range(10):
                if i == at:
                    go_on.wait(longest)
                yield {"i": i}

        return examples()

    try:
        raises(
            lambda: streamed(ad.data.from_iterator(rows, read_timeout=0.2)).take((8,)),
            rf"for {named} \(by thread adaptive-input, ",
            r"in (rows|examples)\n +go_on\.wait",
        )
    finally:
        go_on.set()


def test_a_transform_that_hangs_over_an_iterator():
    go_on, longest = threading.Event(), limit(100)

    def decode(example):
        if example["i"] == 3:
            go_on.wait(longest)
        return example

    try:
        stream = streamed(ad.data.from_iterator([{"i": i} for i in range(8)], map=decode), PATIENT)
        raises(lambda: stream.take((8,)), "^rank 1", "for example 3 of the iterator", "in decode")
    finally:
        go_on.set()


# --- by processes -----------------------------------------------------------------------------------------------------


@pytest.fixture
def by_processes(tmp_path):
    """Data that two processes read, which have been started, and hang from now on."""
    marker = tmp_path / "hangs"
    data = ad.data.from_source(HangsIfThere(str(marker)), num_readers=2)
    data.rows(np.arange(12))
    marker.touch()
    yield data, marker
    marker.unlink(missing_ok=True)
    data.close()


def readers(data):
    return [psutil.Process(pid) for pid in data._pool._executor._processes]


def test_a_read_by_a_process_is_named_with_its_stack_and_the_process_is_ended(by_processes):
    data, marker = by_processes
    data.read_timeout = 1.0
    stream, processes = Stream(data, seed=0, workers=range(1)), readers(data)
    pids = "|".join(str(process.pid) for process in processes)
    raises(
        lambda: stream.take((40,)),
        rf"for example 13 of the data \(by reader process ({pids}).*, for \d+ s\)\.\n",
        r"test_read_watch\.py\", line \d+ in waits_for_the_disk",
    )
    assert not psutil.wait_procs(processes, timeout=limit(20))[1]
    marker.unlink()
    assert sorted(stream.take((40,)).batches[0]["i"]) == list(range(40))  # by others


def test_a_stopped_process_is_reported_as_stopped(by_processes):
    data, marker = by_processes
    marker.unlink()
    for process in readers(data):
        process.suspend()
    data.read_timeout = 1.0
    with pytest.raises(ad.DataError, match=r"by reader process \d+, stopped \(SIGSTOP.*kill -CONT"):
        Stream(data, seed=0, workers=range(1)).take((40,))


class HangsAtStart(HangsIfThere):
    def __setstate__(self, state):
        vars(self).update(state)
        Path(f"{self.marker}-begun").touch()
        self.waits_for_the_disk()


def test_a_process_that_hangs_when_it_opens_the_data(tmp_path):
    marker = tmp_path / "hangs"
    marker.touch()
    data = ad.data.from_source(HangsAtStart(str(marker)), num_readers=1)
    try:
        rows = data.thread.submit(data.rows, np.arange(10))
        until((tmp_path / "hangs-begun").exists)
        (read,) = data.current_reads()
        assert re.fullmatch(r"the pickled data set \(by reader process \d+, for \d+ s\)", str(read))
        assert "in __setstate__" in read.stack()
        marker.unlink()
        assert rows.result(limit(60))["i"].tolist() == list(range(10))
        until(lambda: not data.current_reads())
    finally:
        data.close()


# --- nothing waits for them -------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, time
import jax.numpy as jnp, numpy as np
import adaptive as ad, collectives as comm

HOW, END = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)

def hang():
    if os.path.exists("hangs"):
        open("has begun", "w").close()
        time.sleep(100_000)

class Source:
    def __len__(self): return 1000
    def __getitem__(self, index):
        hang()
        return {"x": np.float32(index)}

def rows():
    for i in range(1000):
        hang()
        yield {"x": np.float32(i)}

def driver(state, batch):
    return state, {"n": comm.all_reduce(batch["x"].mean())}

data = {
    "thread": lambda: ad.data.from_source(Source()),
    "iterator": lambda: ad.data.from_iterator(rows),
    "process": lambda: ad.data.from_source(Source(), num_readers=1),
}[HOW]()
program = ad.Program(driver, jnp.zeros(()), data, global_batch=10, resizable=False)
for report in program.run(steps=2): pass
open("hangs", "w").close()
if END == "interrupted":
    while True: program.step()
program._parts.stream.prefetch((100,))  # as behind the last step
while not os.path.exists("has begun"): time.sleep(0.01)
if END == "closed": program.close()
"""


ENDS = [("thread", "interrupted"), ("iterator", "closed"), ("process", "left")]
MORE = [("thread", "closed"), ("iterator", "left"), ("process", "interrupted"), ("process", "closed")]


@pytest.mark.parametrize(("how", "end"), [*ENDS, *(pytest.param(*each, marks=pytest.mark.long) for each in MORE)])
def test_a_process_ends_at_once_while_a_read_hangs(how, end, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment, pipe = {**os.environ, "PYTHONPATH": str(ROOT)}, subprocess.PIPE
    command = [sys.executable, "script.py", how, end]
    with subprocess.Popen(command, stderr=pipe, text=True, cwd=tmp_path, env=environment) as running:
        readers = []
        try:
            until(lambda: (tmp_path / "has begun").exists() or running.poll() is not None)
            readers = psutil.Process(running.pid).children(recursive=True)
            if end == "interrupted":
                running.send_signal(signal.SIGINT)
            _, errors = running.communicate(timeout=limit(30))
            assert running.returncode == (-signal.SIGINT if end == "interrupted" else 0), errors
            assert end != "interrupted" or "KeyboardInterrupt" in errors
            assert not psutil.wait_procs(readers, timeout=limit(20))[1]
        finally:
            running.kill()
            for reader in readers:
                if reader.is_running():
                    reader.kill()
