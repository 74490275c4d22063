"""A program that ends while a kernel is being compiled: `python ending.py HOW MARKER`.

HOW: "end": close the program and end; "raise" an exception; or "exit" with status 3. MARKER is a file that is written
when that kernel is compiled.
"""

import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp

import adaptive as ad
import collectives as comm
from adaptive.runtime.kernels import compiled as _kernels

HOW, MARKER = sys.argv[1:]
REAL = _kernels.compile_segment
compiling = threading.Event()


def large(x):
    """Takes XLA, which unrolls nothing itself, some 10 ms per layer."""
    for i in range(60):
        x = jnp.sort(jnp.sin(x @ x) * (i + 1.5), axis=i % 2)
    return x


def compile_segment(function, shapes, device, **options):
    if threading.current_thread().name == "adaptive-compiler":
        compiling.set()
        sharding = jax.sharding.SingleDeviceSharding(device)
        REAL(large, (jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=sharding),), device, name="large")
        Path(MARKER).touch()
    return REAL(function, shapes, device, **options)


def driver(state, batch):
    mean = comm.all_reduce(batch["x"].mean())
    return state + mean, {"mean": mean}


_kernels.compile_segment = compile_segment
with comm.world() as world:
    program = ad.Program(driver, jnp.zeros(()), {"x": jnp.arange(64.0)}, global_batch=4 * world.size)
    program.step()
    compiling.wait()
    print("the last word", end="")
    if HOW == "raise":
        raise ValueError("as it was to be")
    if HOW == "exit":
        sys.exit(3)
    program.close()
