"""Two processes that `jax.distributed` joins; see test_worlds.py."""

from __future__ import annotations

import jax

from tests import jaxrun

jax.config.update("jax_enable_x64", True)
jaxrun.join()

import numpy as np  # noqa: E402

import adaptive as ad  # noqa: E402
import collectives as comm  # noqa: E402
from tests.contract.problem import DATA, START, check_descent, descend, one_worker  # noqa: E402

with comm.world() as world:
    assert isinstance(world, comm.JaxWorld)
    assert (world.size, world.processes) == (2, 2)
    options = {"global_batch": 12, "deterministic": True, "microbatch": 3}
    with ad.Program(descend, START, DATA, **options) as program:
        reports = list(program.run(steps=3))  # equal batches
        program.rescale(global_batch=15, shares=[1, 2])
        reports += program.run(steps=3)
        assert reports[-1].batch_sizes == (5, 10)
        check_descent(program.state, reports)
        np.testing.assert_allclose(program.state, one_worker([12] * 3 + [15] * 3)[0], rtol=0, atol=1e-12)
print("ended well", flush=True)
