"""`run(until_epoch=…, until_step=…)` counts from the beginning of the training, across runs and restores."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.runtime.local_world import LocalWorld

COVERS = ("adaptive/program/runs.py",)

DATA = {"y": np.arange(48, dtype=np.float32)}


def driver(state, batch):
    return state + comm.all_reduce(batch["y"].mean()), {}


def build():
    return ad.Program(driver, jnp.zeros(()), DATA, global_batch=12, world=LocalWorld(2), resizable=False)


def steps_of(program, **limits):
    return [report.step for report in program.run(**limits)]


@pytest.mark.parametrize("limit", [{"until_step": 10}, {"until_epoch": 2, "until_step": 10}, {"until_epoch": 3}])
def test_a_run_that_is_resumed_ends_where_one_run_would(limit):
    with build() as program:
        whole = steps_of(program, **limit)
        expected = float(program.state)
    with build() as first, build() as second, build() as late:
        assert steps_of(first, steps=5) == [1, 2, 3, 4, 5]
        second.restore(first.checkpoint())
        assert steps_of(second, **limit) == whole[5:]
        assert float(second.state) == expected
        late.restore(second.checkpoint())
        assert steps_of(late, **limit) == []  # nothing is left


def test_limits_of_both_kinds_end_a_run_at_the_first_of_them():
    with build() as program:
        assert steps_of(program, steps=3, until_epoch=2) == [1, 2, 3]
        assert steps_of(program, epochs=1, until_step=100) == [4]
        assert steps_of(program, epochs=2, until_step=6) == [5, 6]


def test_totals_of_data_without_epochs():
    data = ad.data.from_iterator(lambda: ({"y": np.float32(1)} for _ in iter(int, 1)), length=float("inf"))
    with ad.Program(driver, jnp.zeros(()), data, global_batch=12, world=LocalWorld(1), resizable=False) as program:
        with pytest.raises(ad.DataError):
            next(program.run(until_epoch=3))
        assert steps_of(program, until_step=2) == [1, 2]
