"""The cost of a step of several processes without MPI, relative to the same step in one `shard_map` over all devices.

    python benchmarks/jax_world_against_shard_map.py

`jax.distributed` joins two processes, each with one CPU device, one core, and one thread of XLA. `shard_map`: one
jitted program over both devices, a `pmean` of the gradients' pytree, and batches of equal size placed by
`jax.make_array_from_process_local_data`; and the same with all gradients in one flat array. This library: a `JaxWorld`
exchanges a preamble, and runs a step of equal batches as one program; batches may be unequal, and values that are not
finite are detected. All take their batches from the same arrays by fancy indexing, and blocks of steps alternate. Aimed
at: 10 % for steps of 10 to 30 ms.

The processor time of all threads of rank 0, without waiting, is also reported; on a busy machine it varies less.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")

PROCESSES = 2


def start() -> int:
    """Start this script in all processes, and return an exit status."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, *sys.argv, "--coordinator", address]
    environment = {**os.environ, "PJRT_NPROC": "1", "JAX_PLATFORMS": "cpu"}
    started = [subprocess.Popen([*command, "--process", str(i)], env=environment) for i in range(PROCESSES)]
    return max(abs(process.wait()) for process in started)


def by_shard_map(model: Model, mesh: Mesh, *, flat: bool) -> Callable[[int], jax.Array]:
    """Return a function that takes a number of steps, written as a careful user of JAX would for equal batches."""
    everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("worker"))

    @partial(jax.jit, donate_argnums=(0, 1))
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("worker")), out_specs=P(), check_vma=False)
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(model.loss_fn)(params, batch)
        if flat:
            sent, unravel = ravel_pytree((loss, grads))
            loss, grads = unravel(jax.lax.pmean(sent, "worker"))
        else:
            loss, grads = jax.lax.pmean((loss, grads), "worker")
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = jax.device_put(jax.tree.map(np.asarray, model.params), everywhere)
    opt_state = jax.device_put(jax.tree.map(np.asarray, OPTIMIZER.init(model.params)), everywhere)
    kept = {"params": params, "opt": opt_state, "at": 0}
    order, local = np.random.default_rng(0).permutation(N_EXAMPLES), model.local_batch

    def steps(count: int) -> jax.Array:
        for _ in range(count):
            begin = (kept["at"] + jax.process_index() * local) % (N_EXAMPLES - local)
            kept["at"] += PROCESSES * local
            own = jax.tree.map(lambda a, b=begin: a[order[b : b + local]], model.data)
            batch = jax.tree.map(partial(jax.make_array_from_process_local_data, split), own)
            kept["params"], kept["opt"], loss = step(kept["params"], kept["opt"], batch)
        return loss

    return steps


def processor_time(work: Callable[[], object], taken: list[float]) -> Callable[[], object]:
    """Wrap a function so that it also records the processor time of this process."""

    def timed() -> object:
        began = time.process_time()
        result = jax.block_until_ready(work())
        taken.append(time.process_time() - began)
        return result

    return timed


def main(options: argparse.Namespace) -> None:
    rows = []
    mesh = Mesh(np.array(jax.devices()), ("worker",))
    models = [conv_net("conv net", 64), conv_net("conv net", 128), large_matrices("large matrices", 128)]
    for model in models:
        with comm.JaxWorld() as world:
            ours = program(model, world, monitored=False)
            leaves, flat = (by_shard_map(model, mesh, flat=flat) for flat in (False, True))

            def of_ours(ours=ours) -> object:
                return list(ours.run(steps=options.block))[-1].metrics["loss"]

            ways = {
                "shard_map": lambda leaves=leaves: leaves(options.block),
                "shard_map, flat": lambda flat=flat: flat(options.block),
                "ours": of_ours,
            }
            cores: dict[str, list[float]] = {name: [] for name in ways}
            timed = {name: processor_time(work, cores[name]) for name, work in ways.items()}
            seconds = alternate(timed, options.rounds, warmup=3)
            compared = summary({name: s / options.block for name, s in seconds.items()}, "shard_map, flat")
            about = {"step": model.name, "local batch": model.local_batch}
            for row in compared:
                taken = float(np.median(cores[row.name][-options.rounds :])) / options.block
                rows.append({**about, **row.cells(), "processor time": readable(taken)})
            ours.close()
    if jax.process_index() == 0:
        report(
            "What a step of two processes without MPI costs over the same step in one shard_map",
            rows,
            "jax_world_against_shard_map.md" if options.write else None,
            [
                f"{PROCESSES} processes of jax.distributed on this host, a core each; {options.rounds} rounds of "
                f"{options.block} steps. shard_map's messages go by gloo. Ratios are to the flat one.",
            ],
        )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=25)
    arguments.add_argument("--block", type=int, default=10, help="steps that are timed together")
    arguments.add_argument("--write", action="store_true", help="the table to benchmarks/results")
    arguments.add_argument("--coordinator", help=argparse.SUPPRESS)
    arguments.add_argument("--process", type=int, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.coordinator is None:
        sys.exit(start())

    import jax

    jax.distributed.initialize(given.coordinator, PROCESSES, given.process, cluster_detection_method="deactivate")

    import numpy as np
    import optax
    from _loops import N_EXAMPLES, OPTIMIZER, Model, conv_net, large_matrices, program
    from _measure import alternate, pin, readable, report, summary
    from jax.flatten_util import ravel_pytree
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import collectives as comm

    pin(sorted(os.sched_getaffinity(0))[given.process % len(os.sched_getaffinity(0))])
    main(given)
