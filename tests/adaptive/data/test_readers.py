"""Threads and processes that read: results, errors, ends that wait for nothing, and the deadline of a read."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import adaptive as ad
import collectives as comm
from adaptive.base.process.waits import wait_of
from adaptive.data.stream import Stream, open_data
from tests.speed import limit

from .streams import batches

ROOT = Path(__file__).resolve().parents[3]


# --- threads ----------------------------------------------------------------------------------------------------------


ENDS = """
import multiprocessing, threading
from adaptive.data.readers import ReaderThreads

def fork():
    process = multiprocessing.get_context("fork").Process(target=int)  # as PyTorch's loaders begin their workers
    process.start()
    process.join()
    return process.exitcode

thread, begun = ReaderThreads(), threading.Event()
print(thread.call(fork), flush=True)
thread.submit(lambda: begun.set() or threading.Event().wait())
thread.submit(print, "nobody waits for this")
begun.wait()
print("over")
"""


def test_a_process_ends_while_a_task_runs_and_so_does_one_forked_in_a_task():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", ENDS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit(60))
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["0", "over"], "")


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


@pytest.mark.parametrize(("num_threads", "ahead"), [(1, False), (3, True)])
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


def test_a_late_piece_of_a_read_is_named_by_its_first_example(monkeypatch):
    source = Hanging(6)
    data = ad.data.from_source(source, num_threads=2, read_timeout=0.2)
    monkeypatch.setattr(data, "piece", lambda examples: 4)
    with pytest.raises(ad.DataError, match="waiting for example 4 of the data"):
        data.rows(np.arange(8))
    source.ends.set()
    data.close()


def test_an_iterator_that_hangs_ends_with_an_error_too():
    ends = threading.Event()

    def rows():
        for i in itertools.count():
            if i == 6:
                ends.wait(limit(120))
            yield {"i": np.int32(i)}

    data = ad.data.from_iterator(rows, read_timeout=0.2, length=100)
    stream = Stream(open_data(data, 1, range(1)), seed=0, workers=range(1))
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


def test_a_deadline_that_is_none_is_refused():
    with pytest.raises(ad.DataError, match="read_timeout="):
        ad.data.from_source(Hanging(), read_timeout=-1)
    with pytest.raises(ad.DataError, match="read_timeout="):
        ad.data.from_iterator(list, read_timeout="soon")


# --- processes --------------------------------------------------------------------------------------------------------


class Numbers:
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return {"i": index, "pid": os.getpid()}


class UserError(Exception):
    """One that cannot be made again from what pickle keeps of it."""

    def __init__(self, index, why):
        super().__init__(f"{index}: {why}")


class Broken(Numbers):
    """Example 13 cannot be read, nor example 3 the first time, and the first reader of example 23 is killed."""

    def __init__(self, folder):
        self.folder = folder

    def __getitem__(self, index):
        if index == 13:
            raise UserError(index, "no such file")
        marker = self.folder / str(index)
        if index in (3, 23) and not marker.exists():
            marker.touch()
            if index == 3:
                raise OSError("the connection was reset")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def noise(example, rng):
    return {**example, "r": rng.random()}


@pytest.fixture(scope="module")
def read():
    """Data that two processes read; they stay for the tests of this module."""
    data = ad.data.from_source(Numbers(), random_map=noise, num_readers=2)
    yield data
    data.close()


def taken(data, plan, workers=2, seed=5):
    """What a stream of these data gives, fetched ahead, as examples and as batches."""
    stream = Stream(data, seed=seed, workers=range(workers))
    found = [batch for step in batches(stream, plan) for batch in step if batch is not None]
    if stream._ahead:
        stream._ahead[2]()
    return found


def test_reader_processes_return_what_a_thread_returns_under_any_resizes(read):
    plan = [(8, 8), (8, 8), (3, 13), (16, 0), (1, 1), (9, 9)]
    alone = taken(ad.data.from_source(Numbers(), random_map=noise), plan)
    beside = taken(read, plan)
    for one, other in zip(alone, beside, strict=True):
        assert one["i"].tolist() == other["i"].tolist()
        assert one["r"].tolist() == other["r"].tolist()
    drawn = [r for batch in alone for r in batch["r"].tolist()]
    assert len(set(drawn)) == len(drawn) == 84  # more than an epoch: an example has others in the next one
    pids = {pid for batch in beside for pid in batch["pid"].tolist()}
    assert os.getpid() not in pids
    assert len(pids_of(read)) == 2


def pids_of(data):
    return set(data.readers._executor._processes) if data.readers._executor else set()


def gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=limit(20))
    return not alive


def test_an_error_in_a_reader_is_raised_and_reading_continues(tmp_path):
    data = ad.data.from_source(Broken(tmp_path), num_readers=1)
    try:
        with pytest.raises(ad.DataError, match="UserError: 13: no such file") as error:
            data.rows(np.arange(10, 20))
        notes = "\n".join(error.value.__notes__)
        assert "in reading example 13 of the data" in notes
        assert 'raise UserError(index, "no such file")' in notes
        with pytest.raises(OSError, match="the connection was reset"):
            data.rows(np.arange(5))
        assert data.rows(np.arange(5))["i"].tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(ad.DataError, match="a process that reads examples was lost"):
            data.rows(np.arange(20, 30))
        assert data.rows(np.arange(20, 30))["i"].tolist() == list(range(20, 30))  # by another one
    finally:
        data.close()


def test_data_that_cannot_be_pickled_is_refused():
    source = Numbers()
    source.lock = threading.Lock()
    data = ad.data.from_source(source, num_readers=1)
    with pytest.raises(ad.DataError, match="cannot be sent to other processes: TypeError"):
        data.rows(np.arange(2))


SCRIPT = """
import os, signal, sys, time
import jax.numpy as jnp, numpy as np
import adaptive as ad, collectives as comm

signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells have their background jobs ignore

class Numbers:  # in the script itself, which has no `if __name__ == "__main__"`
    def __len__(self): return 1000
    def __getitem__(self, index): return {"x": np.float32(index)}

def driver(state, batch):
    return state, {"n": comm.all_reduce(batch["x"].mean())}

data = ad.data.from_source(Numbers(), num_readers=1)
program = ad.Program(driver, jnp.zeros(()), data, global_batch=8, resizable=False)
for report in program.run():
    if report.step == 3:
        print(*program._parts.data.readers._executor._processes, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_no_reader_outlives_its_parent(number, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    try:
        pids = [int(pid) for pid in running.stdout.readline().split()]
        readers = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        assert len(pids) == 1
        for _ in range(10):  # one that falls into a destructor is lost, as in any Python program
            running.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                running.wait(timeout=limit(10))
                break
        assert running.returncode is not None
        assert gone(readers)
    finally:
        running.kill()
        running.stdout.close()


def test_readers_leave_signals_to_their_parent(read):
    read.rows(np.arange(4))  # they start with the first read
    (process, *_) = [psutil.Process(pid) for pid in pids_of(read)] or [None]
    assert process is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        process.send_signal(number)
    time.sleep(0.05)
    assert read.rows(np.arange(40))["i"].tolist() == list(range(40))
    assert process.is_running()


def test_a_program_trains_and_evaluates_and_ends_them(read):
    def driver(state, batch):
        return state, {"n": comm.all_reduce(batch["i"].astype(jnp.float32).mean())}

    with ad.Program(driver, jnp.zeros(()), read, global_batch=12, resizable=False) as program:
        means = [float(report.metrics["n"]) for report in program.run(epochs=1)]
        assert np.isclose(np.mean(means), 29.5)
        assert np.isclose(program.evaluate(lambda state, batch: batch["i"].mean(), read, batch=25), 29.5)
        assert program.check()
        processes = [psutil.Process(pid) for pid in pids_of(read)]
    assert len(processes) == 2
    assert gone(processes)
