"""All processes work; one is lost, one goes to the reserve, and is called in again; see test_losses.py.

`adaptive run -n 3 fewer_after_a_loss.py`
"""

from __future__ import annotations

import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)

import adaptive as ad  # noqa: E402
import collectives as comm  # noqa: E402
from tests.program.problems import adam_driver, adam_state, difference, make_data, plain_adam  # noqa: E402

STEPS, GLOBAL_BATCH, SEED = 30, 48, 3


def driver(state, batch):
    new, metrics = adam_driver(state, batch)
    rows = [comm.all_gather(1.0), comm.all_gather((ad.worker_index() >= 0).astype(jnp.float32))]
    counts = [ad.num_workers(), comm.all_reduce(1, op="sum"), comm.all_reduce(ad.worker_index() * 0 + 1, op="sum")]
    return new, {**metrics, "counts": counts, "rows": rows}


with comm.world() as world:
    own = world.workers[0]
    program = ad.Program(driver, adam_state(), make_data(160), global_batch=GLOBAL_BATCH, seed=SEED)
    program.warm_up()
    for report in program.run(steps=STEPS):
        there = [worker_slot in report.members for worker_slot in range(world.capacity)]
        assert [int(count) for count in report.metrics["counts"]] == [sum(there)] * 3, report.metrics["counts"]
        assert all(np.array_equal(np.isfinite(row), there) for row in report.metrics["rows"]), report.metrics["rows"]
        assert world.capacity == 3
        if report.step == 3 and own == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if report.step == 6:
            assert report.members == (0, 1), report
            program.rescale(workers=1)
        if report.step == 10:
            assert report.members == (0,), report
            program.rescale(workers=2)
        while report.step == 11 and own == 0 and not world.poll_ready():
            time.sleep(0.001)
    assert report.members == (0, 1), report
    assert difference(program.state["params"], plain_adam(make_data(160), [GLOBAL_BATCH] * STEPS, SEED)) < 1e-10
print(f"rank {own} ended well", flush=True)
