"""A step of workers that are meshes of CPU devices, relative to the same sharded step written by hand.

    PJRT_NPROC=1 JAX_NUM_CPU_DEVICES=4 mpirun --oversubscribe -n 2 python -m mpi4py benchmarks/sharded_worker.py

By hand: a jitted gradient whose leaves have their parameters' shardings, an Allreduce of each device's part of each
leaf, and a jitted, donated update. Both take their batches from the same arrays, and blocks of steps alternate.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import alternate, command_line, pin, readable, report, summary
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import adaptive as ad
import collectives as comm

RANKS = MPI.COMM_WORLD
TX = optax.adam(1e-3)
SPECS = (P("fsdp", "tp"), P("tp", "fsdp"), P("fsdp", "tp"), P("tp", "fsdp"))
MODELS = {"width 256": (256, 64), "width 768": (768, 64), "width 768, large batches": (768, 512)}  # and local batch


def loss_fn(params: list[jax.Array], x: jax.Array) -> jax.Array:
    y = x
    for w in params:
        y = jnp.tanh(y @ w)
    return jnp.square(y - x).mean()


def driver(state: Any, x: jax.Array) -> Any:
    params, opt = state
    loss, grads = comm.all_reduce(jax.value_and_grad(loss_fn)(params, x))
    updates, opt = TX.update(grads, opt, params)
    return (optax.apply_updates(params, updates), opt), {"loss": loss}


class ByHand:
    """The same step in plain JAX and mpi4py."""

    def __init__(self, mesh: jax.sharding.Mesh, params: list[jax.Array], data: np.ndarray, local: int):
        shardings = [w.sharding for w in params]
        self._state = jax.tree.map(jnp.copy, params), jax.tree.map(jnp.zeros_like, (params, params))
        self._data, self._local, self._rng = data, local, np.random.default_rng(RANKS.rank)
        self._rows = NamedSharding(mesh, P("fsdp"))

        @jax.jit
        def gradient(params: Any, x: jax.Array) -> Any:
            loss, grads = jax.value_and_grad(loss_fn)(params, x)
            return loss, [jax.lax.with_sharding_constraint(g, s) for g, s in zip(grads, shardings, strict=True)]

        def update(state: Any, grads: Any, count: float) -> Any:
            params, (mu, nu) = state
            opt = optax.ScaleByAdamState(jnp.zeros((), jnp.int32), mu, nu)
            grads = [g / count for g in grads]
            updates, (opt, _) = TX.update(grads, (opt, optax.EmptyState()), params)
            return optax.apply_updates(params, updates), (opt.mu, opt.nu)

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


def main() -> None:
    arguments = command_line(__doc__)
    arguments.add_argument("--rounds", type=int, default=15)
    arguments.add_argument("--block", type=int, default=10, help="steps that are timed together")
    args = arguments.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    pin(cores[RANKS.rank % len(cores)])
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), devices=jax.local_devices(), axis_types=(AxisType.Auto,) * 2)
    rows = []
    with comm.world(mesh=mesh) as world:
        for name, (width, local) in MODELS.items():
            rng = np.random.default_rng(0)
            data = rng.normal(size=(2048, width)).astype(np.float32)
            weights = [rng.normal(0, width**-0.5, (width, width)).astype(np.float32) for _ in SPECS]
            params = [jax.device_put(w, NamedSharding(mesh, s)) for w, s in zip(weights, SPECS, strict=True)]
            program = ad.Program(
                driver, (params, TX.init(params)), data, global_batch=local * RANKS.size, resizable=False, world=world
            )
            by_hand = ByHand(mesh, params, data, local)
            calls = {
                "by hand": lambda by_hand=by_hand: by_hand.steps(args.block),
                "ours": lambda program=program: list(program.run(steps=args.block))[-1].metrics["loss"],
            }
            seconds = alternate(calls, args.rounds, warmup=2)
            for row in summary({way: s / args.block for way, s in seconds.items()}):
                more = float(np.median(seconds[row.name] - seconds["by hand"])) / args.block
                rows.append({"model": name, "local batch": local, **row.cells(), "over by hand": readable(more)})
            program.close()
    if RANKS.rank == 0:
        notes = [f"{RANKS.size} ranks of 2 x 2 CPU devices, one core each; {args.rounds} rounds of {args.block} steps."]
        path = "sharded_worker.md" if args.write else None
        report("A step of workers that are meshes", rows, path, notes)


if __name__ == "__main__":
    main()
