"""Jobs whose last rank hangs in a read: `mpirun -n 2 python hanging_reads.py PATIENCE build|step [READ_TIMEOUT]`."""

from __future__ import annotations

import logging
import sys
import time

import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm

PATIENCE, WHEN = float(sys.argv[1]), sys.argv[2]
TIMEOUT = float(sys.argv[3]) if len(sys.argv) > 3 else None


class Source:
    hangs = False

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.hangs and world.rank == world.processes - 1:
            self.waits_for_the_disk()
        return {"x": np.float32(index)}

    def waits_for_the_disk(self):
        while True:
            time.sleep(1)


def driver(state, batch):
    return state + comm.all_reduce(batch["x"].mean()), {}


logging.basicConfig(format="%(levelname)s of pid %(process)d: %(message)s", level=logging.INFO)
with comm.world(hang_timeout=PATIENCE) as world:
    source = Source()
    data = ad.data.from_source(source, read_timeout=TIMEOUT)
    source.hangs = WHEN == "build"
    program = ad.Program(driver, jnp.zeros(()), data, global_batch=8, resizable=False)
    for report in program.run(steps=6):
        source.hangs |= report.step == 2
