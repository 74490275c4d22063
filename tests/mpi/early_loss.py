"""A rank dies before the kernels of larger batches are compiled; see test_losses.py.

`adaptive run -n 3 early_loss.py [whole]`. With `whole`, a batch cannot be split into microbatches.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import jax

jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import adaptive as ad  # noqa: E402
import collectives as comm  # noqa: E402
from adaptive.runtime.kernels.compiled import NO_WORKER, CompiledKernels  # noqa: E402
from tests.program.problems import adam_driver, adam_state, difference, make_data, plain_adam  # noqa: E402

EXAMPLES, GLOBAL_BATCH, SEED, WHOLE = 160, 48, 3, "whole" in sys.argv
compile_at_last, later = CompiledKernels.compile, threading.Event()


def compile_later(self, local_index, size):
    if local_index != NO_WORKER and threading.current_thread() is not threading.main_thread():
        later.wait()
    compile_at_last(self, local_index, size)


def driver(state, batch):
    new, metrics = adam_driver(state["adam"], {"x": batch["x"], "label": batch["label"]})
    count = comm.all_reduce(jnp.zeros(EXAMPLES, jnp.int32).at[batch["number"]].add(1), op="sum")
    own = batch["x"].max() if WHOLE else 0.0  # of the whole local batch
    return {"adam": new, "taken": state["taken"] + count, "own": state["own"] + own}, metrics


CompiledKernels.compile = compile_later
start = {"adam": adam_state(), "taken": jnp.zeros(EXAMPLES, jnp.int32), "own": jnp.zeros(())}
data = {**make_data(EXAMPLES), "number": np.arange(EXAMPLES)}
with comm.world() as world:
    own, batches, sizes = world.rank, [], []
    program = ad.Program(
        driver, start, data, global_batch=GLOBAL_BATCH, seed=SEED, per_worker_state=lambda state: state["own"]
    )
    for report in program.run():
        batches.append(report.global_batch)
        sizes.append(report.batch_sizes)
        if report.step == 3:
            if own == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            waited, kernels = report.waited_seconds, report.kernels
        if report.step == 8:
            assert (report.waited_seconds, report.kernels) == (waited, kernels), report
            later.set()
        if report.batch_sizes == (24, 0, 24):
            break
    before = (16, 0, 16) if WHOLE else (32, 0, 16)
    assert sizes[:8] == [(16, 16, 16)] * 3 + [before] * 5, sizes
    assert set(sizes[8:]) <= {before, (24, 0, 24)}, sizes
    assert report.waited_seconds == waited, report
    assert difference(program.state["adam"]["params"], plain_adam(data, batches, SEED)) < 1e-10
    np.testing.assert_array_equal(program.state["taken"].sum(), sum(batches))
print(f"rank {own} ended well", flush=True)
