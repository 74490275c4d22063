"""Every example once, on ranks: read by processes or from an iterator, while workers join and leave."""

from __future__ import annotations

import os
import time

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm

pytestmark = [pytest.mark.ranks, pytest.mark.on_ranks(2)]

LENGTH = 40


@pytest.fixture(scope="module")
def world():
    with comm.MPIWorld() as world:
        yield world


class Numbers:
    """A source that says whether the process that created it has read the example."""

    def __init__(self):
        self.pid = os.getpid()

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return {"i": np.float32(index), "here": np.int32(os.getpid() == self.pid)}


def rows(epoch):
    for i in range(LENGTH):
        yield {"i": np.float32(i), "here": np.int32(0)}


def driver(state, batch):
    total, here = comm.all_reduce((batch["i"].sum(), batch["here"].sum()), op="sum")
    return state, {"sum": total, "here": here}


def expect(report, order):
    """That a step took the examples that stand there, and another process has read them."""
    taken = [order(position) for position in range(report.examples - report.global_batch, report.examples)]
    assert float(report.metrics["sum"]) == sum(taken), (report, taken)
    assert not report.metrics["here"], report


def test_examples_are_read_by_other_processes(world):
    source = ad.data.from_source(Numbers(), num_readers=1)
    with ad.Program(driver, jnp.zeros(()), source, global_batch=6, seed=4) as program:
        for report in program.run(epochs=2):
            expect(report, lambda p: int(program._parts.stream.indices(p, 1)[0]))
            if report.step == 3:
                program.rescale(global_batch=8, shares=[1, 3])
            if report.step == 6:
                program.rescale(shares=[1, 0])


def test_an_iterator_goes_on_where_it_was_as_workers_leave_and_join_and_after_a_restore(world):
    with ad.Program(driver, jnp.zeros(()), ad.data.from_iterator(rows), global_batch=6) as program:
        program.warm_up()
        for report in program.run(steps=20):
            expect(report, lambda p: p % LENGTH)
            assert report.epoch == report.examples // LENGTH
            if report.step == 3:
                program.rescale(workers=1)
            if report.step == 6:
                assert report.members == (0,), report
                program.rescale(workers=2)
            while report.step == 8 and world.rank == 0 and len(world.members) < 2 and not world.poll_ready():
                time.sleep(0.001)
            if report.step == 12:
                program.rescale(shares=[1, 5])
        assert report.members == (0, 1), report
        kept = program.checkpoint()
    with ad.Program(driver, jnp.zeros(()), ad.data.from_iterator(rows), global_batch=6) as program:
        program.restore(kept)
        expect(program.step(), lambda p: p % LENGTH)


def test_ranks_whose_iterators_have_not_the_same_are_refused(world):
    other = ad.data.from_iterator(lambda: [{**row, "i": row["i"] + world.rank} for row in rows(0)])
    with pytest.raises(ad.DisagreementError, match=r"data\['i'\] is not the same on all ranks"):
        ad.Program(driver, jnp.zeros(()), other, global_batch=6)
