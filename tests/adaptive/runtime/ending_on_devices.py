"""A script over several devices that ends while its step is being traced in the background."""

import threading
import time

import jax.numpy as jnp

import adaptive as ad
import collectives as comm
from adaptive.runtime import fused_step

traced, REAL = threading.Event(), fused_step.FusedProgram


def slow(*args):
    if threading.current_thread().name == "adaptive-compiler":
        traced.set()
        time.sleep(0.5)  # the script ends meanwhile
    program = REAL(*args)
    print(", and a step", end="", flush=True)
    return program


def driver(state, batch):
    return state + comm.all_reduce(batch["x"].mean()), {}


fused_step.FusedProgram = slow
program = ad.Program(driver, jnp.zeros(()), {"x": jnp.arange(64.0)}, global_batch=8, world=comm.DeviceWorld())
program.rescale(global_batch=16)
program.step()
traced.wait()
print("the last word", end="", flush=True)
