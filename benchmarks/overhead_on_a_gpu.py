"""The cost of a step on one GPU relative to a hand-written loop's, in time and in device memory.

    python benchmarks/overhead_on_a_gpu.py [--write]

By hand: one jitted function with a donated state, which a loop dispatches without waiting, so the GPU never idles; or
with the loss read after each step, as loops do that print it, stop at a target or look for NaNs. A program is one
worker that checks gradients and updates for NaNs and times each step, which it waits for. All take their batches from
the same arrays by fancy indexing. Blocks of steps alternate.

The memory is JAX's peak on the device over building and a few steps, each way in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import _timed_models as timed
import jax
import numpy as np
import optax
from _measure import alternate, command_line, report, rows_beside, table
from _timed_models import OPTIMIZER, Model
from _training import driver_of

import adaptive as ad

HAND, READ, OURS = "by hand", "by hand, each loss read", "ours"
WAYS = (HAND, READ, OURS)
MIB = 1 << 20


def models() -> dict[str, Callable[[], Model]]:
    """Return the timed models by name, with batches that occupy a GPU, and small ones."""
    return {
        "empty": lambda: timed.empty(8),
        "perceptron": lambda: timed.perceptron("perceptron", 256),
        "conv net": lambda: timed.conv_net("conv net", 2048),
        "large matrices": lambda: timed.large_matrices("large matrices", 2048),
        "attention": lambda: timed.attention("attention", 256),
        "recurrent": lambda: timed.recurrent("recurrent", 32),
        "transformer": lambda: timed.transformer("transformer", 16),
    }


def steps_of(model: Model, way: str) -> Callable[[int], Any]:
    """Return a function that takes a number of steps in one of the ways, and returns the last loss."""
    state = (model.params, OPTIMIZER.init(model.params))
    if way == OURS:
        sizes = {"global_batch": model.local_batch, "deterministic": True, "resizable": False}
        program = ad.Program(driver_of(model.loss_fn, OPTIMIZER), state, model.data, **sizes)
        return lambda count: list(program.run(steps=count))[-1].metrics["loss"]

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(model.loss_fn)(params, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    jitted = jax.jit(step, donate_argnums=0)
    state = jax.tree.map(lambda a: jax.device_put(a, may_alias=False), state)
    order, at = np.random.default_rng(0).permutation(len(jax.tree.leaves(model.data)[0])), 0

    def steps(count: int) -> Any:
        nonlocal state, at
        for _ in range(count):
            rows, at = order[at : at + model.local_batch], (at + model.local_batch) % (len(order) - model.local_batch)
            state, loss = jitted(state, jax.tree.map(lambda a, r=rows: a[r], model.data))
            if way == READ:
                float(loss)
        return loss

    return steps


def times(model: Model, rounds: int, block: int) -> list[dict[str, object]]:
    """Return a row for each way: the seconds of a step, and their ratio to those by hand."""
    ways = {name: steps_of(model, name) for name in WAYS}
    seconds = alternate({name: lambda w=way: w(block) for name, way in ways.items()}, rounds, warmup=3)
    seconds = {name: s / block for name, s in seconds.items()}
    return rows_beside(seconds, HAND, "over by hand", step=model.name, batch=model.local_batch)


def peak(name: str, way: str) -> dict[str, int]:
    """Return the bytes of a model's parameters and the peak of the device's memory, in this new process."""
    model = models()[name]()
    model = model._replace(params=jax.tree.map(np.asarray, model.params))
    before = (jax.devices()[0].memory_stats() or {}).get("bytes_in_use", 0)
    jax.block_until_ready(steps_of(model, way)(8))
    params = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    return {"before": before, "params": params, **(jax.devices()[0].memory_stats() or {})}


def peaks(name: str) -> list[dict[str, object]]:
    """Return a row for each way: the peak of the device's memory."""
    found = {}
    for way in (HAND, OURS):
        command = [sys.executable, __file__, "--peak-of", way, "--only", name]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found[way] = json.loads(out.splitlines()[-1])
    return [
        {
            "model": name,
            "": way,
            "parameters": f"{of['params'] / MIB:.0f} MiB",
            "peak": f"{of.get('peak_bytes_in_use', 0) / MIB:.0f} MiB",
            "ratio": f"{of.get('peak_bytes_in_use', 0) / max(found[HAND].get('peak_bytes_in_use', 0), 1):.3f}",
        }
        for way, of in found.items()
    ]


def main() -> None:
    """Measure and report."""
    args = command_line(
        __doc__,
        rounds=15,
        block=(30, "steps that are timed together"),
        only=("", "models whose names contain this"),
        peak_of=(None, "print the memory of one way"),
        memory=("transformer,large matrices", "models whose memory is measured"),
    ).parse_args()
    if args.peak_of:
        print(json.dumps(peak(args.only, args.peak_of)))
        return
    rows = []
    for name, make in models().items():
        if args.only in name:
            rows += times(make(), args.rounds, args.block)
            print(table(rows[-len(WAYS) :]), flush=True)
    memory = [row for name in args.memory.split(",") if name for row in peaks(name)]
    device = jax.devices()[0].device_kind
    notes = [
        f"One worker on {device}; {args.rounds} rounds of {args.block} steps, each block a call of `run()`. Adam.",
        "Peak of the device's memory, over 8 steps in a process of its own:",
        *([table(memory)] if memory else []),
    ]
    report("What a step costs over a hand-written loop's, on a GPU", rows, args.write, notes)


if __name__ == "__main__":
    main()
