"""The model of `sharded_worker.py`, and its steps in one process: run as a script, it takes them on request.

    python benchmarks/_sharded_model.py WIDTH GLOBAL_BATCH WORKERS CORE...

Reads lines such as `one jit 10` or `DeviceWorld 10`, takes so many steps, and answers each with a line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import pin
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import adaptive as ad
import collectives as comm

TX = optax.adam(1e-3)
SPECS = (P("fsdp", "tp"), P("tp", "fsdp"), P("fsdp", "tp"), P("tp", "fsdp"))
WAYS = ("one jit", "DeviceWorld")


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


def examples_and_weights(width: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the data set and the first weights."""
    rng = np.random.default_rng(0)
    data = rng.normal(size=(2048, width)).astype(np.float32)
    return data, [rng.normal(0, width**-0.5, (width, width)).astype(np.float32) for _ in SPECS]


def work(width: int, local: int) -> dict[str, str]:
    """Return the bytes of a gradient, and the operations of a worker's step for each of them, as cells of a table."""
    nbytes, operations = 4 * len(SPECS) * width**2, 3 * 2 * len(SPECS) * width**2 * local
    return {"gradient": f"{nbytes / 1e6:.1f} MB", "FLOPs per byte": f"{operations / nbytes:.0f}"}


def by_one_jit(workers: int, width: int, batch: int) -> Callable[[int], Any]:
    """Return a function that takes steps of one program over the devices of all workers, as written by hand."""
    names, kinds = ("workers", "fsdp", "tp"), (AxisType.Auto,) * 3
    mesh = jax.make_mesh((workers, 2, 2), names, devices=jax.local_devices()[: 4 * workers], axis_types=kinds)
    data, weights = examples_and_weights(width)
    shardings = [NamedSharding(mesh, spec) for spec in SPECS]
    params = [jax.device_put(w, s) for w, s in zip(weights, shardings, strict=True)]
    kept = {"state": (params, TX.init(params))}
    rows, rng = NamedSharding(mesh, P(("workers", "fsdp"))), np.random.default_rng(0)

    def step(state: Any, x: jax.Array) -> Any:
        params, opt = state
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, opt = TX.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    everywhere = NamedSharding(mesh, P())
    to = jax.tree.map(lambda leaf: leaf.sharding if leaf.ndim else everywhere, kept["state"]), everywhere
    call = jax.jit(step, donate_argnums=0, out_shardings=to)

    def steps(count: int) -> Any:
        for _ in range(count):
            x = jax.device_put(data[rng.integers(0, len(data), batch)], rows)
            kept["state"], loss = call(kept["state"], x)
        return jax.block_until_ready((kept["state"], loss))

    return steps


def by_device_world(workers: int, width: int, batch: int) -> Callable[[int], Any]:
    """Return a function that takes steps of a program whose workers are devices, each with the whole state."""
    data, weights = examples_and_weights(width)
    world = comm.DeviceWorld(jax.local_devices()[:workers])
    state = weights, TX.init(weights)
    program = ad.Program(driver, state, data, global_batch=batch, resizable=False, world=world)
    return lambda count: jax.block_until_ready(list(program.run(steps=count))[-1].metrics["loss"])


def main() -> None:
    width, batch, workers, *cores = map(int, sys.argv[1:])
    pin(*cores)
    made = by_one_jit(workers, width, batch), by_device_world(workers, width, batch)
    ways = dict(zip(WAYS, made, strict=True))
    for line in sys.stdin:
        way, _, count = line.strip().rpartition(" ")
        ways[way](int(count))
        print("done", flush=True)


if __name__ == "__main__":
    main()
