"""Drivers with state, operator states and a policy, whose runs are compared before and after a checkpoint."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive import operators
from adaptive.base.decision import Decision
from adaptive.base.values.arrays import numbers_of
from adaptive.operators.sources import Source, read
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import Recorder, make_data, mean_loss

W = np.array([0.3, -0.2, 0.1], np.float32)
PLACE = Source("place", lambda r: 1.0 + r.worker)


class Growing(Recorder):
    """A policy with a state: after every third step it requests as many more examples as it has seen steps."""

    def __init__(self):
        super().__init__(every_step=True)

    def init(self, n_workers):
        return {"steps": 0, "losses": np.zeros(n_workers), "on device": jnp.zeros(())}

    def __call__(self, observation, state):
        self.seen.append(observation)
        new = {
            "steps": state["steps"] + 1,
            "losses": state["losses"] + observation.values[0],
            "on device": state["on device"] + 1,
        }
        decision = Decision(global_batch=observation.global_batch + new["steps"]) if observation.due else None
        return decision, new


def driver_of(handler):
    def driver(state, batch):
        loss, grads = jax.value_and_grad(mean_loss)(state["w"], batch)
        loss = mon.ema(comm.all_reduce(loss))
        operators.hook("grow", handler, (loss,), every=3)
        key, _ = jax.random.split(state["key"])
        w = state["w"] - 0.1 * comm.all_reduce(grads)
        return {"key": key, "n": state["n"] + 1, "w": w}, {"loss": loss}

    return driver


def state():
    return {"key": jax.random.key(3), "n": 0, "w": W}


def build(driver, state, workers=2, **options):
    options = {"global_batch": 5, "world": LocalWorld(workers), "deterministic": True, **options}
    return ad.Program(driver, state, make_data(24), **options)


def plain(tree):
    return jax.tree.map(numbers_of, tree)


def course(program, steps):
    program.warm_up()
    reports = list(program.run(steps=steps))
    return [(r.step, r.epoch, r.examples, r.batch_sizes, float(r.metrics["loss"])) for r in reports]


def local(state, batch):
    smooth = mon.ema(read(PLACE))
    own = state["own"] + read(PLACE)
    return {"own": own, "all": comm.all_reduce(own, op="sum")}, {
        "smooth": comm.all_gather(smooth),
        "y": comm.all_reduce(batch["y"].mean()),
    }


def counting(label, shape=()):
    def driver(state, batch):
        operators.operator_state(label, np.zeros(shape), lambda n: (n + 1, None))
        return jax.tree.map(lambda s: s + comm.all_reduce(batch["y"].mean()), state), {}

    return driver
