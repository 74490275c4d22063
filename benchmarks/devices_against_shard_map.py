"""What a step of several devices of one process costs over the same step in one `shard_map`.

    python benchmarks/devices_against_shard_map.py

Four CPU devices. By `shard_map`: one jitted program over all devices, `psum` of gradients, batches of equal size put
there by one `device_put`. Ours: a `DeviceWorld`, kernels of each device dispatched by themselves, one program that
reduces, one that updates on each device; it may have batches of unequal sizes, and checks what is not finite. Both take
their batches from the same arrays by fancy indexing; blocks of steps are timed in turn. The target is 5 % at 20 ms.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 4)

from _loops import N_EXAMPLES, OPTIMIZER, Model, conv_net, large_matrices, program  # noqa: E402
from _measure import alternate, readable, report, summary  # noqa: E402

import collectives as comm  # noqa: E402


def by_shard_map(model: Model, devices: list[jax.Device]) -> Callable[[int], jax.Array]:
    """What a careful user of JAX writes for equal batches; returns a function that takes so many steps."""
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


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=25)
    arguments.add_argument("--block", type=int, default=10, help="steps that are timed together")
    options = arguments.parse_args()
    rows = []
    for model in (conv_net("conv net", 32), conv_net("conv net", 64), large_matrices("large matrices", 128)):
        with comm.DeviceWorld() as world:
            ours, theirs = program(model, world, monitored=False), by_shard_map(model, list(world.devices))
            ways = {
                "shard_map": lambda theirs=theirs: theirs(options.block),
                "ours": lambda ours=ours: list(ours.run(steps=options.block))[-1].metrics["loss"],
            }
            seconds = alternate(ways, options.rounds, warmup=3)
            for row in summary({name: s / options.block for name, s in seconds.items()}):
                more = float(np.median(seconds[row.name] - seconds["shard_map"])) / options.block
                rows.append(
                    {
                        "step": model.name,
                        "local batch": model.local_batch,
                        **row.cells(),
                        "over shard_map": readable(more),
                    }
                )
            ours.close()
    report(
        "What a step of four devices costs over one shard_map",
        rows,
        "devices_against_shard_map.md",
        [f"Four CPU devices in one process; {options.rounds} rounds of {options.block} steps, neither pinned."],
    )


if __name__ == "__main__":
    main()
