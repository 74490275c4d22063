"""Data of all kinds on ranks that come and go, and on ranks that have not the same; see test_input_on_ranks.py.

`adaptive run -n 2 fed.py`
"""

from __future__ import annotations

import os
import time

import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm

LENGTH = 40


class Numbers:
    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return {"i": np.float32(index), "here": np.int32(os.getpid() == PID)}


PID = os.getpid()


def rows(epoch):
    for i in range(LENGTH):
        yield {"i": np.float32(i), "here": np.int32(0)}


def driver(state, batch):
    return state, {
        "sum": comm.all_reduce(batch["i"].sum(), op="sum"),
        "here": comm.all_reduce(batch["here"].sum(), op="sum"),
    }


def expect(program, report, order):
    """That a step took the examples that stand there."""
    taken = [order(position) for position in range(report.examples - report.global_batch, report.examples)]
    assert float(report.metrics["sum"]) == sum(taken), (report, taken)
    assert not report.metrics["here"], report  # read by other processes


with comm.world() as world:
    own = world.workers[0]
    source = ad.data.from_source(Numbers(), num_readers=1)
    with ad.Program(driver, jnp.zeros(()), source, global_batch=6, seed=4) as program:
        for report in program.run(epochs=2):
            expect(program, report, lambda p: int(program._parts.stream.indices(p, 1)[0]))
            if report.step == 3:
                program.rescale(global_batch=8, shares=[1, 3])
            if report.step == 6:
                program.rescale(shares=[1, 0])
    with ad.Program(driver, jnp.zeros(()), ad.data.from_iterator(rows), global_batch=6) as program:
        program.warm_up()
        for report in program.run(steps=20):
            expect(program, report, lambda p: p % LENGTH)
            assert report.epoch == report.examples // LENGTH
            if report.step == 3:
                program.rescale(workers=1)
            if report.step == 6:
                assert report.members == (0,), report
                program.rescale(workers=2)
            while report.step == 8 and own == 0 and not world.poll_ready():
                time.sleep(0.001)
            if report.step == 12:
                program.rescale(shares=[1, 5])
        assert report.members == (0, 1), report
        kept = program.checkpoint()
    with ad.Program(driver, jnp.zeros(()), ad.data.from_iterator(rows), global_batch=6) as program:
        program.restore(kept)
        expect(program, program.step(), lambda p: p % LENGTH)
    try:
        ad.Program(
            driver,
            jnp.zeros(()),
            ad.data.from_iterator(lambda: [{**r, "i": r["i"] + own} for r in rows(0)]),
            global_batch=6,
        )
    except ad.DisagreementError as error:
        print(f"rank {own} raised: {error}", flush=True)
print(f"rank {own} ended well", flush=True)
