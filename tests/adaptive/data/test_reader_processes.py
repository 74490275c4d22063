"""Reader processes return what one process would read, and end with their parent."""

from __future__ import annotations

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
from adaptive.data.stream import Stream
from tests.speed import limit

ROOT = Path(__file__).resolve().parents[3]


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
    """Example 13 cannot be read, and the first reader of example 23 is killed."""

    def __init__(self, marker):
        self.marker = marker

    def __getitem__(self, index):
        if index == 13:
            raise UserError(index, "no such file")
        if index == 23 and not os.path.exists(self.marker):
            Path(self.marker).touch()
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
    stream, batches = Stream(data, seed=seed, workers=range(workers)), []
    for sizes in plan:
        batches += [b for b in stream.take(sizes).batches if b is not None]
        stream.prefetch(sizes)
        stream.advance(sizes)
    if stream._ahead:
        stream._ahead[2].result()
    return batches


def test_reader_processes_return_what_a_thread_returns_under_any_resizes(read):
    plan = [(8, 8), (8, 8), (3, 13), (16, 0), (1, 1), (9, 9)]
    alone = taken(ad.data.from_source(Numbers(), random_map=noise), plan)
    beside = taken(read, plan)
    for one, other in zip(alone, beside, strict=True):
        assert one["i"].tolist() == other["i"].tolist()
        assert one["r"].tolist() == other["r"].tolist()
    pids = {pid for batch in beside for pid in batch["pid"].tolist()}
    assert os.getpid() not in pids
    assert len(pids_of(read)) == 2


def pids_of(data):
    return set(data._processes._executor._processes) if data._processes._executor else set()


def gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=limit(20))
    return not alive


def test_an_error_in_a_reader_is_raised_and_reading_continues(tmp_path):
    data = ad.data.from_source(Broken(str(tmp_path / "dead")), num_readers=1)
    try:
        with pytest.raises(ad.DataError, match="UserError: 13: no such file") as error:
            data.rows(np.arange(10, 20))
        notes = "\n".join(error.value.__notes__)
        assert "in reading example 13 of the data" in notes
        assert 'raise UserError(index, "no such file")' in notes
        assert data.rows(np.arange(5))["i"].tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(ad.DataError, match="a process that reads examples was lost"):
            data.rows(np.arange(20, 30))
        assert data.rows(np.arange(20, 30))["i"].tolist() == list(range(20, 30))  # by another one
    finally:
        data.close()


class FailsOnce(Numbers):
    """The first read of example 3 raises."""

    def __init__(self, marker):
        self.marker = marker

    def __getitem__(self, index):
        if index == 3 and not os.path.exists(self.marker):
            Path(self.marker).touch()
            raise OSError("the connection was reset")
        return super().__getitem__(index)


def test_after_a_failed_read_the_step_can_be_taken_again(tmp_path):
    stream = Stream(ad.data.from_source(FailsOnce(str(tmp_path / "failed")), num_readers=1), seed=5, workers=range(1))
    try:
        with pytest.raises(OSError, match="the connection was reset"):
            stream.take([60])
        (batch,) = stream.take([60]).batches
        assert sorted(batch["i"].tolist()) == list(range(60))
    finally:
        stream.close()


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
        print(*program._parts.data._processes._executor._processes, flush=True)
    END
"""
ENDS = {
    "interrupted": ("pass", signal.SIGINT),
    "killed": ("pass", signal.SIGKILL),
    "failed": ("if report.step == 4: raise OSError('of the user')", None),
    "left": ("if report.step == 4: break", None),
}


@pytest.mark.parametrize(
    "end", ["killed", "interrupted", *(pytest.param(e, marks=pytest.mark.long) for e in ("failed", "left"))]
)
def test_no_reader_outlives_its_parent(end, tmp_path):
    code, number = ENDS[end]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("END", code))
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
            if number is not None:
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
