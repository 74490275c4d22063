"""With `max_local_batch="auto"` a GPU trains with batches that do not fit its memory.

    python benchmarks/batches_by_memory.py [--write]

Four cases, each in a process whose part of the GPU is 6 GiB: a batch of 512 of which XLA reports that it does not fit;
a batch that fits until other arrays take the memory between two steps, which is an error; the same for the memory of
the update of the state; and a batch that does not fit, without "auto". The model's activations take 16 MB per example.
On CPUs, which report no limit, only the first case runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _measure import report

import adaptive as ad
import collectives as comm

GIB, MIB = 1 << 30, 1 << 20
WIDTH, LAYERS = 256, 4
FITS_NOT, TAKEN, UPDATE, WITHOUT = (
    "a batch of 512",
    "memory is taken",
    "memory of the update is taken",
    'without "auto"',
)
CASES = (FITS_NOT, TAKEN, UPDATE, WITHOUT)


def loss_fn(weights: Any, batch: Any, tokens: int) -> jax.Array:
    """Return the loss of a perceptron that is applied to each of an example's tokens."""
    x = batch["x"][:, None, :] * jnp.linspace(1.0, 2.0, tokens)[None, :, None]
    for w in weights:
        x = jnp.tanh(x @ w)
    return ((x.mean((1, 2)) - batch["y"]) ** 2).mean()


def program(batch: int, *, tokens: int, hungry: int = 0, auto: bool = True) -> ad.Program:
    """Return a program that trains with SGD; its update sorts a matrix of `hungry` rows and columns."""

    def driver(weights: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(weights, batch, tokens)
        more = 0.0
        if hungry:
            more = (
                0
                * jnp.sort(
                    jax.random.normal(jax.random.fold_in(jax.random.key(0), ad.step_number()), (hungry, hungry))
                )[0, 0]
            )
        grads = comm.all_reduce(grads)
        return [w - 0.1 * g + more for w, g in zip(weights, grads, strict=True)], {"loss": comm.all_reduce(loss)}

    rng = np.random.default_rng(0)
    data = {
        "x": rng.standard_normal((2048, WIDTH), np.float32),
        "y": rng.standard_normal(2048, np.float32),
    }
    weights = [rng.standard_normal((WIDTH, WIDTH), np.float32) / 16 for _ in range(LAYERS)]
    bound = {"max_local_batch": "auto"} if auto else {}
    return ad.Program(driver, weights, data, global_batch=batch, resizable=False, **bound)


def take(leave: int) -> list[jax.Array]:
    """Take the device's memory but for `leave` bytes, in arrays of 64 MiB."""
    stats = jax.devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    return [jax.block_until_ready(jnp.ones(16 * MIB, jnp.float32)) for _ in range((free - leave) // (64 * MIB))]


def run(case: str, tokens: int) -> dict[str, str]:
    """Return a row: the microbatches of the first and of the last step, and what was reported."""
    held: list[jax.Array] = []
    batch, hungry = {FITS_NOT: (512, 0), TAKEN: (64, 0), UPDATE: (8, 8192), WITHOUT: (2048, 0)}[case]
    reports, told = [], ""
    with program(batch, tokens=tokens, hungry=hungry, auto=case != WITHOUT) as trained:
        try:
            for step in range(12):
                if step == 6 and case in (TAKEN, UPDATE):
                    held = take(800 * MIB)
                reports.append(trained.step())
        except Exception as error:  # each case reports its own
            told = f"{type(error).__name__}: {' '.join([str(error), *getattr(error, '__notes__', ())])}"
    notes = " ".join(note for step in reports for note in step.notes)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    del held
    return {
        "": case,
        "steps": str(len(reports)),
        "first microbatches": _sizes(reports[:1]),
        "last microbatches": _sizes(reports[-1:]),
        "peak": f"{peak / GIB:.2f} GiB",
        "report": (notes or told).replace("\n", " ")[:400],
    }


def _sizes(reports: list[ad.Report]) -> str:
    return " + ".join(map(str, reports[0].microbatches[0])) if reports else ""


def main() -> None:
    """Measure and report."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--case", choices=CASES, help="print the row of one case")
    arguments.add_argument("--tokens", type=int, default=4096, help="of an example")
    arguments.add_argument("--gpu-gib", type=float, default=80.0, help="the memory of the GPU")
    arguments.add_argument("--write", action="store_true")
    args = arguments.parse_args()
    if args.case:
        print(json.dumps(run(args.case, args.tokens)))
        return
    environ = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{6 / args.gpu_gib:.4f}"}
    rows = []
    for case in CASES if jax.default_backend() == "gpu" else CASES[:1]:
        command = [sys.executable, __file__, "--case", case, "--tokens", str(args.tokens)]
        out = subprocess.run(command, check=True, capture_output=True, text=True, env=environ).stdout
        rows.append(json.loads(out.splitlines()[-1]))
    notes = [f"One worker, with 6 GiB of a GPU of {args.gpu_gib:.0f} GiB."]
    report("Batches that do not fit a GPU's memory", rows, "batches_by_memory.md" if args.write else None, notes)


if __name__ == "__main__":
    main()
