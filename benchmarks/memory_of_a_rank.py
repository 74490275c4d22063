"""A rank needs at most 1.10 times the memory of a hand-written donated loop, in the steady state and at its peak.

    python benchmarks/memory_of_a_rank.py [--mib 96 384] [--write]

Two MPI ranks train an MLP with Adam. Each case runs in new processes: by hand (a jitted gradient, one Allreduce per
leaf into one set of receive buffers, a jitted update with a donated state), and as a driver with and without
`resizable`. Both start from the same state, made by a function that keeps no reference to it.

*Steady* is the resident memory (VmRSS), the mean over 12 steps after background compilation has ended, because the C
library returns freed memory after some steps and not after others. *Peak* is VmHWM of the whole process, building and
compiling included. *Live arrays* are `jax.live_arrays()` and, by hand, the receive buffers, as multiples of the
parameters.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _hosts import job, tell
from _measure import command_line, report

CASES = ("by hand", "resizable=False", "resizable")
LAYERS, LOCAL_BATCH, N_EXAMPLES, STEPS = 6, 16, 512, 12
MIB = 1 << 20
OPTIMIZER = optax.adam(1e-4)


def initial_state(width: int) -> Any:
    """Return parameters and the optimizer's state as JAX arrays to which there is no other reference."""
    make = jax.jit(lambda key: jax.random.normal(key, (width, width), jnp.float32) / width**0.5)
    params = [make(key) for key in jax.random.split(jax.random.key(0), LAYERS)]
    return params, OPTIMIZER.init(params)


def loss_fn(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for w in params[:-1]:
        x = jax.nn.relu(x @ w)
    return jnp.mean((x @ params[-1] - batch["y"]) ** 2)


def examples(width: int) -> dict[str, np.ndarray]:
    """Return the data set."""
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(N_EXAMPLES, width)).astype(np.float32) for name in ("x", "y")}


def by_hand(width: int) -> tuple[Callable[[], float], int]:
    """Return a step of the hand-written loop, and the bytes that it holds in addition to JAX's arrays."""
    from mpi4py import MPI

    ranks, rows = MPI.COMM_WORLD, examples(width)
    params, opt_state = initial_state(width)
    gradient = jax.jit(jax.value_and_grad(loss_fn))

    def new_state(params: Any, opt_state: Any, summed: Any) -> Any:
        grads = jax.tree.map(lambda g: g / ranks.size, summed)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    update = jax.jit(new_state, donate_argnums=(0, 1))
    received = [np.empty(p.shape, p.dtype) for p in params]
    at = ranks.rank * LOCAL_BATCH

    def step() -> float:
        nonlocal params, opt_state, at
        batch = {name: leaf[at : at + LOCAL_BATCH] for name, leaf in rows.items()}
        at = (at + ranks.size * LOCAL_BATCH) % N_EXAMPLES
        loss, grads = gradient(params, batch)
        for sent, into in zip(grads, received, strict=True):
            ranks.Allreduce(np.asarray(sent), into)
        params, opt_state = update(params, opt_state, received)
        jax.block_until_ready(params)  # before `received` is written again
        return float(loss)

    return step, sum(buffer.nbytes for buffer in received)


def as_driver(width: int, *, resizable: bool) -> Any:
    """Return the same step as a program."""
    from _training import driver_of  # what the loop by hand does not need takes memory, too

    import adaptive as ad
    import collectives as comm

    world = comm.world().__enter__()
    sizes = {"global_batch": LOCAL_BATCH * world.size, "resizable": resizable}
    return ad.Program(
        driver_of(loss_fn, OPTIMIZER), lambda: initial_state(width), examples(width), world=world, **sizes
    )


def resident() -> tuple[float, float]:
    """Return this process's resident memory now and at its peak, in MiB."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, peak = (int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return now, peak


def rank(case: str, mib: int) -> None:
    """Run one case; rank 0 tells the memory, the mean over ranks."""
    from mpi4py import MPI

    width, beside = round((mib * MIB / 4 / LAYERS) ** 0.5), 0
    step: Callable[[], Any]
    if case == "by hand":
        step, beside = by_hand(width)
    else:
        program = as_driver(width, resizable=case == "resizable")
        step = program.step
    built = resident()[1]
    for _ in range(STEPS):
        step()
    if case != "by hand":
        program.warm_up()
    found = []
    for _ in range(STEPS):
        step()
        found.append(resident()[0])
    gc.collect()
    live = sum(a.nbytes for a in jax.live_arrays()) + beside
    steady, peak = sum(found) / len(found), resident()[1]
    marks = {"built": built, "steady": steady, "peak": peak, "live": live / (4 * LAYERS * width**2)}
    everyone = MPI.COMM_WORLD.gather(marks)
    if everyone is not None:
        tell({name: sum(m[name] for m in everyone) / len(everyone) for name in marks})


def main() -> None:
    arguments = command_line(__doc__, rank=(None, "run the part of a rank, of this case"))
    arguments.add_argument("--mib", type=int, nargs="+", default=[96], help="of parameters")
    options = arguments.parse_args()
    if options.rank is not None:
        rank(options.rank, options.mib[0])
        return
    rows = []
    for mib in options.mib:
        found = {case: job([__file__, "--rank", case, "--mib", str(mib)], 2) for case in CASES}
        for case, marks in found.items():
            row = {"parameters": f"{mib} MiB", "case": case}
            for name in ("steady", "peak"):
                row[name] = f"{marks[name]:,.0f} MiB"
                row[f"{name}, of by hand"] = f"{marks[name] / found['by hand'][name]:.2f}"
            rows.append(row | {"peak of building": f"{marks['built']:,.0f} MiB", "live arrays": f"{marks['live']:.2f}"})
    notes = [
        f"Two ranks, means over them; {LAYERS} layers, Adam, {LOCAL_BATCH} examples a rank. Live arrays are "
        "multiples of the parameters: five are parameters, Adam's two, gradient and what was received."
    ]
    report("Memory of a rank, beside a hand-written donated loop", rows, options.write, notes)


if __name__ == "__main__":
    main()
