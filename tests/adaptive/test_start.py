"""What happens before the first step has ended: how often the driver is traced, and which programs are compiled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.speed import limit

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, sys, threading
import jax, jax.numpy as jnp, numpy as np, optax
import adaptive as ad, collectives as comm, monitors as mon

compiled, traced = [], []

def in_background():
    return threading.current_thread().name == "adaptive-compiler"

def note(event, seconds, **about):  # also of what is found in the compilation cache
    if event.endswith("/backend_compile_duration") and not in_background():
        compiled.append(about["fun_name"])

jax.monitoring.register_event_duration_secs_listener(note)
optimizer = optax.adam(0.1)

def loss_of(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) - batch["y"]) ** 2)

def driver(state, batch):
    if not in_background():
        traced.append(len(batch["x"]))
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    mean = comm.all_reduce(grads)
    metrics = {"loss": comm.all_reduce(loss), "noise": mon.noise_scale(grads, mean).scale}
    updates, opt_state = optimizer.update(mean, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), metrics

params = {"w": np.ones(3, np.float32)}
state = jax.block_until_ready((params, optimizer.init(params)))
data = {"x": np.ones((64, 3), np.float32), "y": np.zeros(64, np.float32)}
compiled.clear()
with comm.world(devices=jax.local_devices()[:1]) as world:
    with ad.Program(driver, state, data, global_batch=16, world=world, **OPTIONS) as program:
        float(program.step().metrics["loss"])
        print(json.dumps([len(compiled), traced]))
"""


def started(**options: object) -> list:
    text = f"OPTIONS = {options!r}\n{PROGRAM}"
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=limit(200), check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("options", [{}, pytest.param({"microbatch": 8}, marks=pytest.mark.long)])
def test_a_first_step_compiles_few_programs(options):
    """The gradient, the update, and the sum of two calls. No operation runs alone, which would be another program."""
    found, traced = started(**options)
    assert found == 3
    assert traced in ([16, 8], [8, 4])  # the size of a call, and one more to compare with
