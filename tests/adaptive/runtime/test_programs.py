"""The programs of a step that do not depend on the batch size."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm
from adaptive.runtime.local_world import LocalWorld


def driver(state, batch):
    mean = comm.all_reduce(batch["x"].mean())
    spread = comm.all_reduce(jnp.square(batch["x"] - mean).mean())
    return state + spread, {}


def test_those_that_are_missing_are_counted_before_they_are_compiled():
    with ad.Program(driver, jnp.float32(0), {"x": np.ones(8, np.float32)}, world=LocalWorld(2), global_batch=8) as made:
        programs = made._parts.engine.context.programs
        alone, several = (programs.missing(with_sums=sums) for sums in (False, True))
        for job in programs.jobs():
            job()
        assert len(programs) == alone
        programs.compile_sums()
        assert len(programs) == several > alone
        assert programs.missing(with_sums=True) == 0
        assert programs.jobs() == []
