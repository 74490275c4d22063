"""A program that ends while a kernel is being compiled: `python ending.py HOW MARKER [OPTION …]`.

HOW: "end" normally, "raise" an exception, "exit" with status 3, or "close" the program and then end. MARKER is a file
that is written when that kernel is compiled. Options: "short", the kernel takes a moment; "late", the end takes
longer than the kernel; "elsewhere", there is no glibc.
"""

import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import adaptive as ad
import collectives as comm
from adaptive.runtime import background_threads as _ending
from adaptive.runtime import programs as _programs
from adaptive.runtime.kernels import compiled as _kernels

HOW, MARKER, *OPTIONS = sys.argv[1:]
BACKGROUND, REAL = "adaptive-compiler", _kernels.compile_segment
LAYERS = 60 if "short" in OPTIONS else 1000


def large(x):
    """Takes XLA, which unrolls nothing itself, some 10 ms per layer."""
    for i in range(LAYERS):
        x = jnp.sort(jnp.sin(x @ x) * (i + 1.5), axis=i % 2)
    return x


def compile_segment(function, shapes, device, **options):
    if threading.current_thread().name == BACKGROUND:
        REAL(large, (jax.ShapeDtypeStruct((16, 16), jnp.float32),), device, name="large")
        Path(MARKER).touch()
    return REAL(function, shapes, device, **options)


def driver(state, batch):
    mean = comm.all_reduce(batch["x"].mean())
    return state + mean, {"mean": mean}


class EndsLate:
    """Holds up the interpreter's end, when nothing of Python runs in other threads any more."""

    clock = staticmethod(time.perf_counter)

    def __del__(self):
        start = self.clock()
        while self.clock() - start < 3:
            pass


_kernels.compile_segment = _programs.compile_segment = compile_segment
if "late" in OPTIONS:
    ends_late = EndsLate()
if "elsewhere" in OPTIONS:
    _ending._glibc = lambda: None
with comm.world() as world:
    program = ad.Program(driver, jnp.zeros(()), {"x": jnp.arange(64.0)}, global_batch=4 * world.size)
    program.step()
    while not any(thread.name == BACKGROUND for thread in _ending._inside):
        time.sleep(0.01)
    assert not Path(MARKER).exists()
    print("the last word", end="")
    if HOW == "raise":
        raise ValueError("as it was to be")
    if HOW == "exit":
        sys.exit(3)
    if HOW == "close":
        program.close()
