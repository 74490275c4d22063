"""A step of workers that are meshes of CPU devices, relative to the same sharded step written by hand.

    PJRT_NPROC=1 JAX_NUM_CPU_DEVICES=4 mpirun --oversubscribe -n 2 python -m mpi4py benchmarks/sharded_worker.py

By hand: a jitted gradient whose leaves have their parameters' shardings, an Allreduce of each device's part of each
leaf, and a jitted, donated update.

Beside it, the same model and global batch in one process on the same cores. `one jit`: plain JAX, one program over the
devices of all workers. `DeviceWorld`: as many workers of this library, each with the whole state on one device, so that
a step is one program too.

All take their batches from the same arrays. Blocks of steps alternate, and what does not run sleeps meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import alternate, command_line, pin, readable, report, summary
from _sharded_model import SPECS, TX, WAYS, driver, examples_and_weights, loss_fn, work
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import adaptive as ad
import collectives as comm

RANKS = MPI.COMM_WORLD
CORES = sorted(os.sched_getaffinity(0))
MODELS = {"width 256": (256, 64), "width 768": (768, 64), "width 768, large batches": (768, 512)}  # and local batch


class ByHand:
    """The same step in plain JAX and mpi4py."""

    def __init__(self, mesh: jax.sharding.Mesh, params: list[jax.Array], data: np.ndarray, local: int):
        params = jax.tree.map(jnp.copy, params)
        shardings = [w.sharding for w in params]
        self._state = params, TX.init(params)
        self._data, self._local, self._rng = data, local, np.random.default_rng(RANKS.rank)
        self._rows = NamedSharding(mesh, P("fsdp"))

        @jax.jit
        def gradient(params: Any, x: jax.Array) -> Any:
            loss, grads = jax.value_and_grad(loss_fn)(params, x)
            return loss, [jax.lax.with_sharding_constraint(g, s) for g, s in zip(grads, shardings, strict=True)]

        def update(state: Any, grads: Any, count: float) -> Any:
            params, opt = state
            updates, opt = TX.update([g / count for g in grads], opt, params)
            return optax.apply_updates(params, updates), opt

        self._gradient, self._update = gradient, jax.jit(update, donate_argnums=0)

    def _reduced(self, leaf: jax.Array) -> jax.Array:
        parts = []
        for shard in leaf.addressable_shards:
            received = np.empty(shard.data.shape, shard.data.dtype)
            RANKS.Allreduce(np.asarray(shard.data), received)
            parts.append(jax.device_put(received, shard.device))
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)

    def steps(self, n: int) -> Any:
        for _ in range(n):
            rows = self._data[self._rng.integers(0, len(self._data), self._local)]
            loss, grads = self._gradient(self._state[0], jax.device_put(rows, self._rows))
            total = RANKS.allreduce(float(loss))
            self._state = self._update(self._state, [self._reduced(g) for g in grads], float(RANKS.size))
        return self._state, total


def asleep_until_all() -> None:
    """Return when all ranks have called this. MPI's own barrier would keep a core busy."""
    request = RANKS.Ibarrier()
    while not request.Test():
        time.sleep(2e-4)


@contextmanager
def in_one_process(width: int, batch: int) -> Iterator[dict[str, Callable[[int], None]]]:
    """Start a process that takes steps on all cores, and yield functions that have it take some, by name. All ranks
    call them, and sleep meanwhile.
    """
    process = None
    if RANKS.rank == 0:
        launched = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "PJRT_NPROC")
        plain = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
        script = Path(__file__).with_name("_sharded_model.py")
        process = subprocess.Popen(
            [sys.executable, str(script), *map(str, (width, batch, RANKS.size, *CORES))],
            env={**plain, "JAX_NUM_CPU_DEVICES": str(4 * RANKS.size)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(way: str, count: int) -> None:
        asleep_until_all()
        if process is not None:
            print(f"{way} {count}", file=process.stdin, flush=True)
            if not process.stdout.readline():
                raise OSError("the process with one program over all devices has ended")
        asleep_until_all()

    try:
        yield {way: lambda count, way=way: ask(way, count) for way in WAYS}
    finally:
        if process is not None:
            process.communicate()


def main() -> None:
    args = command_line(
        __doc__, rounds=15, block=(10, "steps that are timed together"), only=("", "models whose names contain this")
    ).parse_args()
    pin(CORES[RANKS.rank % len(CORES)])
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), devices=jax.local_devices(), axis_types=(AxisType.Auto,) * 2)
    rows = []
    with comm.world(mesh=mesh):
        for name, (width, local) in MODELS.items():
            if args.only not in name:
                continue
            batch = local * RANKS.size
            data, weights = examples_and_weights(width)
            params = [jax.device_put(w, NamedSharding(mesh, s)) for w, s in zip(weights, SPECS, strict=True)]
            program = ad.Program(driver, (params, TX.init(params)), data, global_batch=batch, resizable=False)
            by_hand = ByHand(mesh, params, data, local)
            with in_one_process(width, batch) as ways:
                calls: dict[str, Callable[[], Any]] = {
                    "by hand": lambda by_hand=by_hand: by_hand.steps(args.block),
                    "ours": lambda program=program: list(program.run(steps=args.block))[-1].metrics["loss"],
                    **{way: lambda steps=steps: steps(args.block) for way, steps in ways.items()},
                }
                seconds = alternate(calls, args.rounds, warmup=2)
            for row in summary({way: s / args.block for way, s in seconds.items()}):
                more = float(np.median(seconds[row.name] - seconds["by hand"])) / args.block
                cells = {"model": name, "local batch": local, **work(width, local), **row.cells()}
                rows.append({**cells, "over by hand": readable(more)})
            program.close()
    if RANKS.rank == 0:
        notes = [
            f"{RANKS.size} ranks of 2 x 2 CPU devices, one core each, and one process on {len(CORES)} cores; "
            f"{args.rounds} rounds of {args.block} steps. FLOPs of a worker's step, for each byte of its gradient."
        ]
        report("A step of workers that are meshes", rows, args.write, notes)


if __name__ == "__main__":
    main()
