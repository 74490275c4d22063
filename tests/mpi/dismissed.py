"""A policy probes links, and has a worker leave for one of the reserve: `adaptive run -n 4 … dismissed.py`.

See test_dismissed.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm
import controllers as ctrl

LEAVES, EVERY = 1, 4


def update(observation, state):
    """Probe at first; with the result, ask for one more worker; when it is there, let another one leave."""
    if not observation.due:
        return None, state
    if observation.links is None:
        return ad.Decision(probe=True), state
    if state == 0:
        probe, shape = observation.links, observation.links.seconds.shape
        text = f"{len(probe.hosts)} host, {probe.host_of.tolist()}, {shape}, after step {probe.step}"
        return ad.Decision(workers=4, notes=(f"{text}, seen after {observation.step}",)), np.asarray(1)
    if state == 1 and len(observation.members) == 4:
        return ad.Decision(leave=(LEAVES,)), np.asarray(2)
    return None, state


def driver(w, batch):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w - 1) ** 2))(w)
    ctrl.hook(ctrl.Policy(lambda n: np.asarray(0), update, "swap"), comm.all_gather(loss), every=EVERY)
    ctrl.hook(lambda control, loss: LEAVES in control.members or control.stop(), comm.all_reduce(loss), every=50)
    return w - 0.05 * comm.all_reduce(grads), {}


with comm.world(workers=3) as world:
    slot = world.workers[0]
    data = {"x": np.random.default_rng(0).normal(size=(240, 4)).astype(np.float32)}
    program = ad.Program(driver, jnp.zeros(4), data, global_batch=12, world=world)
    try:
        for report in program.run(steps=20_000):
            if world.rank == 0:
                for note in report.notes:
                    print(report.step, note, flush=True)
    except ad.Preempted as left:
        print(f"slot {slot} left, alone: {left.alone}, code {left.code}, {left.args[0]}", flush=True)
        raise
    digests = {bytes(digest) for digest in world.all_gather_bytes(np.asarray(program.state).tobytes())}
    print(f"slot {slot} ended with members {world.members}, {len(digests)} states", flush=True)
