"""Epochs: each example once in each, and the examples of a batch that spans the end of one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm
from adaptive.runtime.local_world import LocalWorld

COVERS = ("adaptive/program/reports.py",)

EXAMPLES = 10


def driver(state, batch):
    counts = jax.nn.one_hot(batch["number"], EXAMPLES).sum(0)
    return state, {"counts": comm.all_reduce(counts, op="sum")}


def counts(global_batch, epochs):
    """How often each step takes each example; shape=(steps, EXAMPLES)."""
    data = {"number": np.arange(EXAMPLES)}
    with ad.Program(driver, jnp.zeros(()), data, global_batch=global_batch, world=LocalWorld(2)) as program:
        return np.array([report.metrics["counts"] for report in program.run(epochs=epochs)])


def test_a_batch_that_spans_the_end_of_an_epoch_can_hold_one_example_twice():
    taken = counts(global_batch=7, epochs=7)
    assert taken.sum(0).tolist() == [7] * EXAMPLES, "each example once per epoch"
    assert taken.max() == 2
    spanning = [step for step in range(len(taken)) if 7 * step // EXAMPLES != (7 * step + 6) // EXAMPLES]
    assert set(np.flatnonzero(taken.max(1) == 2)) <= set(spanning)


def test_batches_that_divide_the_data_set_hold_no_example_twice():
    assert counts(global_batch=5, epochs=6).max() == 1
