"""Reading in several threads: as many as `num_threads=` says, with the same examples and the same errors."""

from __future__ import annotations

import threading
from contextvars import ContextVar

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.data.reader_threads import ReaderThreads
from tests.speed import limit

ROWS = 64
CONTEXT = ContextVar("CONTEXT", default=0)


class Meets:
    """A read waits until so many threads are in one."""

    def __init__(self, threads):
        self.barrier = threading.Barrier(threads)
        self.threads = set()

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        if index:  # the first example is read alone, when the program is built
            self.barrier.wait(limit(30))
        self.threads.add(threading.get_ident())
        return {"i": np.int32(index)}


class Numbers:
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        if index >= 40:
            raise OSError(f"no example {index}")
        return {"i": np.int32(index)}


def test_as_many_threads_read_at_the_same_time_as_were_asked_for():
    source = Meets(4)
    data = ad.data.from_source(source, num_threads=4)
    source.threads.clear()  # of the one that has read example 0
    assert data.rows(np.arange(1, 33))["i"].tolist() == list(range(1, 33))
    assert len(source.threads) == 4
    data.close()
    assert data.rows(np.arange(1, 9))["i"].tolist() == list(range(1, 9))  # they start again
    data.close()


def test_one_thread_reads_by_default():
    source = Meets(1)
    ad.data.from_source(source).rows(np.arange(ROWS))
    source.threads.clear()
    ad.data.from_source(source).rows(np.arange(1, ROWS))
    assert len(source.threads - {threading.get_ident()}) <= 1  # example 0 is read in the background


def test_the_functions_run_in_the_threads_too():
    source = Meets(2)
    transform = lambda example: {"i": 2 * example["i"]}  # noqa: E731
    augment = lambda example, rng: {**example, "n": rng.random(dtype=np.float32)}  # noqa: E731
    data = ad.data.from_source(source, map=transform, random_map=augment, num_threads=2)
    alone = ad.data.from_source(Meets(1), map=transform, random_map=augment)
    one, other = data.rows(np.arange(1, 17)), alone.rows(np.arange(1, 17))
    assert one["i"].tolist() == other["i"].tolist() == list(range(2, 34, 2))
    assert one["n"].tolist() == other["n"].tolist()  # an example's numbers do not depend on the thread
    data.close()


def test_the_error_of_the_first_example_that_cannot_be_read_is_raised():
    data = ad.data.from_source(Numbers(), num_threads=8)
    for _ in range(20):
        with pytest.raises(OSError, match="no example 41") as error:
            data.rows(np.array([1, 2, 41, 50, 3, 60, 63]))
        assert "in reading example 41 of the data" in error.value.__notes__
    data.close()


def test_threads_have_the_callers_context():
    threads, barrier = ReaderThreads(3), threading.Barrier(3)
    CONTEXT.set(7)

    def read(place):
        barrier.wait(limit(30))
        return place, CONTEXT.get()

    assert threads.map(read, 6) == [(place, 7) for place in range(6)]
    threads.close()


@pytest.mark.parametrize("num_threads", [0, -1, 1.5, "2", True])
def test_a_number_of_threads_that_cannot_be_is_refused(num_threads):
    with pytest.raises(ad.DataError, match="num_threads= must be a number of threads"):
        ad.data.from_source(Numbers(), num_threads=num_threads)


def test_threads_and_processes_are_not_both_used():
    with pytest.raises(ad.DataError, match="not both"):
        ad.data.from_source(Numbers(), num_threads=2, num_readers=2)


def test_a_program_trains_on_the_same_examples_with_any_number_of_threads():
    def driver(state, batch):
        return 0.5 * state + comm.all_reduce(batch["i"].astype(jnp.float32).sum()), {}

    def trained(source):
        with ad.Program(driver, jnp.zeros(()), source, global_batch=16, resizable=False) as program:
            for _ in program.run(steps=8):
                pass
            assert f"read by {source.readers}" in program.explain()
            return float(program.state)

    first, second = (ad.data.from_source(Whole(), num_threads=n) for n in (1, 4))
    assert trained(first) == trained(second)
    assert (first.readers, second.readers) == ("a thread", "4 threads")


class Whole(Numbers):
    def __getitem__(self, index):
        return {"i": np.int32(index)}
