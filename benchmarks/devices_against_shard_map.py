"""The cost of a step of several devices of one process, relative to the same step in one `shard_map`.

    python benchmarks/devices_against_shard_map.py

Four CPU devices. `shard_map`: one jitted program over all devices with a donated state and a `psum` of the gradients;
one `device_put` places batches of equal size. This library: a `DeviceWorld` with equal batches, so that a step is also
one program, with checks for values that are not finite. `monitored`: with the noise scale and `balance`, for which
workers are timed at intervals. `host step`: the step for unequal batches, which dispatches the kernels of each
device separately. All take their batches from the same arrays by fancy indexing, and blocks of steps alternate. Aimed
at: 2 %, and 5 % with the noise scale and balance.

The processor time of all threads is also reported; on a busy machine it varies less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 4)

from _loops import program  # noqa: E402
from _measure import alternate, command_line, readable, report, summary  # noqa: E402
from _timed_models import N_EXAMPLES, OPTIMIZER, Model, conv_net, large_matrices  # noqa: E402

import adaptive as ad  # noqa: E402
import collectives as comm  # noqa: E402


def by_shard_map(model: Model, devices: list[jax.Device]) -> Callable[[int], jax.Array]:
    """Return a function that takes a number of steps, written as a careful user of JAX would for equal batches."""
    mesh = Mesh(np.array(devices), ("worker",))
    everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("worker"))

    @partial(jax.jit, donate_argnums=(0, 1))
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("worker")), out_specs=P(), check_vma=False)
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(model.loss_fn)(params, batch)
        loss, grads = jax.lax.pmean((loss, grads), "worker")
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = jax.device_put(jax.tree.map(jnp.copy, model.params), everywhere)
    kept = {"params": params, "opt": jax.device_put(OPTIMIZER.init(params), everywhere), "at": 0}
    order, size = np.random.default_rng(0).permutation(N_EXAMPLES), model.local_batch * len(devices)

    def steps(count: int) -> jax.Array:
        for _ in range(count):
            start = kept["at"] % (N_EXAMPLES - size)
            kept["at"] += size
            batch = jax.tree.map(lambda a, s=start: a[order[s : s + size]], model.data)
            kept["params"], kept["opt"], loss = step(kept["params"], kept["opt"], jax.device_put(batch, split))
        return loss

    return steps


@contextmanager
def by_host_steps(ours: ad.Program) -> Iterator[None]:
    """Have the program take its steps as for unequal batches."""
    engine = ours._parts.engine
    fused, engine.fused = engine.fused, None
    try:
        yield
    finally:
        engine.fused = fused


def main() -> None:
    options = command_line(
        __doc__, rounds=20, block=(10, "steps that are timed together"), only=("", "models whose names contain this")
    ).parse_args()
    rows = []
    for model in (conv_net("conv net", 32), conv_net("conv net", 64), large_matrices("large matrices", 128)):
        if options.only not in model.name:
            continue
        with comm.DeviceWorld() as world, comm.DeviceWorld() as other, comm.DeviceWorld() as third:
            theirs = by_shard_map(model, list(world.devices))
            ours, monitored = program(model, world, monitored=False), program(model, other, monitored=True)
            general = program(model, third, monitored=False)
            programs = {"ours": ours, "monitored": monitored}
            cores: dict[str, list[float]] = {}

            def timed(name: str, work: Callable[[], object], cores: dict = cores) -> Callable[[], object]:
                def of_work() -> object:
                    began = time.process_time()
                    result = jax.block_until_ready(work())
                    cores.setdefault(name, []).append(time.process_time() - began)
                    return result

                return of_work

            def steps(of: ad.Program) -> Callable[[], object]:
                return lambda: list(of.run(steps=options.block))[-1].metrics["loss"]

            ways = {"shard_map": timed("shard_map", lambda theirs=theirs: theirs(options.block))}
            ways |= {name: timed(name, steps(of)) for name, of in programs.items()}
            ways["host step"] = timed("host step", steps(general))
            with by_host_steps(general):
                # 70 steps before: workers are timed by host steps at growing distances, up to every 64th step.
                seconds = alternate(ways, options.rounds, warmup=-(-70 // options.block))
            taken = {name: np.array(of[-options.rounds :]) for name, of in cores.items()}
            for row in summary({name: s / options.block for name, s in seconds.items()}):
                processor = {
                    "processor time": readable(float(np.median(taken[row.name])) / options.block),
                    "its paired ratio": f"{np.median(taken[row.name] / taken['shard_map']):.3f}",
                }
                rows.append({"step": model.name, "local batch": model.local_batch, **row.cells(), **processor})
            for made in (ours, monitored, general):
                made.close()
    report(
        "What a step of four devices costs over one shard_map",
        rows,
        options.write,
        [f"Four CPU devices in one process; {options.rounds} rounds of {options.block} steps, none pinned."],
    )


if __name__ == "__main__":
    main()
