"""The timed training step, written by hand and as a driver."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _timed_models import N_EXAMPLES, OPTIMIZER, Model
from _training import driver_of
from jax.flatten_util import ravel_pytree
from mpi4py import MPI

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon

RANKS = MPI.COMM_WORLD


class ByHand:
    """The step that a careful user of JAX and mpi4py writes.

    A jitted gradient writes one flat buffer, one Allreduce sums it in place, and a jitted function updates the state.
    Each of these is a method, so that it can be timed by itself.
    """

    def __init__(self, model: Model):
        params, loss_fn = model.params, model.loss_fn
        flat, unravel = ravel_pytree(params)

        @jax.jit
        def gradient(params, batch):
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
            return jnp.concatenate([ravel_pytree(grads)[0], loss[None]])

        @jax.jit
        def update(params, opt_state, total):
            updates, opt_state = OPTIMIZER.update(unravel(total[:-1] / RANKS.size), opt_state, params)
            return optax.apply_updates(params, updates), opt_state, total[-1] / RANKS.size

        self.gradient, self.update = gradient, update
        self.model, self.params, self.opt_state = model, params, OPTIMIZER.init(params)
        self.buffer = np.empty(flat.size + 1, np.float32)
        self.order, self.at = np.random.default_rng(0).permutation(N_EXAMPLES), 0

    def steps(self, count: int) -> jax.Array:
        for _ in range(count):
            batch = self.fetch()
            self.receive(self.gradient(self.params, batch))
            self.exchange()
            self.params, self.opt_state, loss = self.update(self.params, self.opt_state, self.buffer)
        return loss

    def fetch(self) -> Any:
        local = self.model.local_batch
        start = (self.at + RANKS.rank * local) % (N_EXAMPLES - local)
        self.at += RANKS.size * local
        return jax.tree.map(lambda a: a[self.order[start : start + local]], self.model.data)

    def receive(self, sent: jax.Array) -> None:
        np.copyto(self.buffer, sent)

    def exchange(self) -> None:
        RANKS.Allreduce(MPI.IN_PLACE, self.buffer)


def program(model: Model, world: Any, *, monitored: bool) -> ad.Program:
    """Return the same training step as a warm program, with or without the noise scale and balancing."""

    def monitors(grads: Any, avg_grads: Any) -> dict[str, Any]:
        ctrl.hook(ctrl.balance(), comm.all_gather(mon.compute_seconds()), every=10)
        return {"noise": mon.noise_scale(grads, avg_grads).scale}

    driver = driver_of(model.loss_fn, OPTIMIZER, *([monitors] if monitored else []))
    state = (model.params, OPTIMIZER.init(model.params))
    # The same microbatches as by hand: one per batch, and of that size. Balancing works, but has no room to move, since
    # what is to be seen is what its work costs, and not what other sizes do.
    local = model.local_batch
    sizes = {"global_batch": local * world.size, "max_local_batch": local, "deterministic": True}
    made = ad.Program(driver, state, model.data, world=world, **sizes)
    made.warm_up()
    return made
