"""A job of ranks whose workers are meshes of four devices each: `adaptive run -n 2 meshes.py`.

Rank 1 leaves for the reserve, joins again, and is killed. The batches are uneven. In the end the state is that of one
device that took the same batches, and no device ever held a whole matrix.
"""

from __future__ import annotations

import os
import signal
import time

import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402

import adaptive as ad  # noqa: E402
import collectives as comm  # noqa: E402
from tests.adaptive.meshes.test_worker_on_a_mesh import HIDDEN, SPECS, driver, make_data, mesh_of, state_on  # noqa: E402
from tests.device_memory import Watch  # noqa: E402
from tests.speed import limit  # noqa: E402

OPTIONS = {"global_batch": 48, "microbatch": 4, "seed": 3}  # few sizes of kernels


def unchanged(state, batch):
    """A driver that is soon traced."""
    return state, {}


def main() -> None:
    mesh = mesh_of()
    with comm.world(mesh=mesh) as world:
        other = mesh_of((4, 1)) if world.rank == 1 else mesh
        own, world.local_mesh = world.local_mesh, type(world.local_mesh)(other)
        with pytest.raises(ad.DisagreementError, match="mesh"):
            ad.Program(unchanged, state_on(other), make_data(), global_batch=48)
        world.local_mesh = own
        swapped = state_on(mesh)
        if world.rank == 1:  # whose parts have the same shapes
            swapped["params"]["b"] = jax.device_put(swapped["params"]["b"], NamedSharding(mesh, SPECS["a"]))
        with pytest.raises(ad.DisagreementError, match=r"the sharding of state\['params'\]\['b'\]"):
            ad.Program(unchanged, swapped, make_data(), global_batch=48)
        program = ad.Program(driver, state_on(mesh), make_data(), shares=[2, 1], **OPTIONS)
        assert program.batch_sizes == (32, 16)
        program.warm_up()
        joined, deadline, watch = 0, time.monotonic() + limit(60), Watch()
        for report in program.run(steps=400):
            if report.step == 2:
                assert report.members == (0, 1), report
                watch.__enter__()
                program.rescale(workers=1)
            if report.step == 4:
                assert report.members == (0,), report
                program.rescale(workers=2)
            joined = report.step if report.joined else joined
            if joined and report.step == joined + 2 and world.workers[0] == 1:
                assert watch.largest == HIDDEN**2 * 8 // 4, watch.largest
                os.kill(os.getpid(), signal.SIGKILL)
            if (joined and report.step == joined + 4) or time.monotonic() > deadline:
                break
        watch.__exit__()
        assert joined
        assert report.members == (0,), report
        assert watch.largest == HIDDEN**2 * 8 // 4, watch.largest  # of a whole matrix no device has more
        specs = {name: leaf.sharding.spec for name, leaf in program.state["params"].items()}
        assert specs == SPECS, specs
        found = jax.device_get(program.state)
        steps = program.steps
    with comm.SoloWorld() as alone:
        reference = ad.Program(driver, state_on(), make_data(), world=alone, resizable=False, **OPTIONS)
        for _ in range(steps):
            reference.step()
        expected = jax.device_get(reference.state)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max())
    print(f"worker {world.workers[0]}: equal after {steps} steps", flush=True)


main()
