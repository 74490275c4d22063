"""The bound on local batches by memory: `max_local_batch="auto"`.

Where a local batch can run as several microbatches, the bound is on these, each process finds its own, and nothing
is exchanged. Where it cannot, all processes exchange their bounds when the program is built, and split the global batch
by them.
"""

from __future__ import annotations

import json
from functools import partial

from adaptive.base.roster import with_same_members
from adaptive.control.batch_sizes import BatchSizes
from adaptive.runtime.engine import Engine


def fit_local_batches(engine: Engine, sizes: BatchSizes, name: str) -> list[str]:
    """Lower the largest local batches of all workers to what fits their memory, and split the global batch again.

    For drivers whose batches cannot be split. Compiles the kernels of the first step, and waits for them.
    Communicates: all processes call it when the program is built.

    Args:
      name: the program's name.

    Returns:
      Notes for the first report.
    """
    world, memory, notes = engine.world, engine.kernels.memory, list[str]()
    assert memory is not None, "local batches are bounded by memory"
    while True:
        before = sizes.current
        engine.expect(before)
        engine.kernels.require_first([before[worker] for worker in world.workers])
        own = json.dumps({worker: memory.most for worker in world.workers if memory.most is not None}).encode()
        everyone = with_same_members(world, partial(world.all_gather_bytes, own, f"local batches of {name}"))
        found = {int(worker): most for bounds in everyone for worker, most in json.loads(bounds).items()}
        upper = sizes.limits.upper
        notes += sizes.limit_local_batches([found.get(slot, upper[slot]) for slot in range(world.capacity)])
        if sizes.current == before:
            return notes
