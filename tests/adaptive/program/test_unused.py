"""A collective whose result nothing uses is not sent, and the first report says so."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm
import controllers as ctrl
from adaptive.runtime.local_world import LocalWorld

COVERS = ("adaptive/graph/partition.py",)

DATA = {"y": np.arange(48, dtype=np.float32)}


def notes_of(driver):
    with ad.Program(driver, jnp.zeros(()), DATA, global_batch=24, world=LocalWorld(2)) as program:
        first, second = program.step().notes, program.step().notes
    assert second == ()
    return [note for note in first if "nothing uses its result" in note]


def test_the_first_report_names_the_line():
    def driver(state, batch):
        gradient = comm.all_reduce(batch["y"].mean())
        comm.all_reduce(batch["y"].max(), op="max")
        comm.all_gather(gradient - batch["y"].mean())
        return state, {}

    notes = notes_of(driver)
    assert [note.partition(" is not sent")[0].partition(" (test_unused.py:")[0] for note in notes] == [
        "all_reduce(op='mean')",
        "all_reduce(op='max')",
        "all_gather",
    ]


def test_nothing_is_said_of_collectives_that_are_used():
    def driver(state, batch):
        mean = comm.all_reduce({"used": batch["y"].mean(), "unused": batch["y"].max()})["used"]
        ctrl.hook(lambda control, value: None, comm.all_reduce(batch["y"].min(), op="min"))
        comm.all_reduce(mean)  # known on all workers already
        return state + mean, {"max": comm.all_reduce(batch["y"].max(), op="max")}

    assert notes_of(driver) == []
