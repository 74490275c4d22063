"""`pair_averaging`: a replica per worker, averaged with a neighbor's in each step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from collectives._leaves import known_capacity
from collectives._local_mean import local_mean
from collectives._neighbor_mean import Schedule, neighbor_mean, schedule_of

from ._strategy import Strategy, one_step
from ._trees import arrays, check_optimizer, plus, select


class PairAveraging(NamedTuple):
    """State of `pair_averaging`: each worker's replica, and whether it has been trained."""

    params: Any  # Local
    opt_state: Any  # Local
    knows: Any  # a boolean: whether the replica is trained, itself or by a mean. Local
    begun: Any  # a boolean: whether a step has been taken. Replicated, so that joining workers receive it


def pair_averaging(optimizer: optax.GradientTransformation, schedule: Schedule = "random") -> Strategy:
    """Return the decentralized SGD strategy: each worker's replica is averaged with a neighbor's.

        x_i <- mean_j W_ij x_j + u_i            u_i: the optimizer's update by the gradient at the old x_i

    This is AD-PSGD with synchronous steps: all workers wait for the slowest. A worker sends its parameters to one other
    worker (in a ring, to two), whatever the number of workers.

    Replicas have equal weights, however many examples they have; workers without examples are excluded and keep their
    replica. A joining worker has the program's initial parameters and is marked as untrained: means exclude it, and
    its first mean with a trained neighbor replaces its parameters. Until then, for one or a few steps, its loss is that
    of the initial parameters. If all trained workers leave, the trained model is lost.

    Args:
      optimizer: an optax optimizer; its state is per worker.
      schedule: which workers average in which step; see `collectives.neighbor_mean`.

    Returns:
      A `Strategy`. Its model is a replica: in `program.state` that of this process's first worker; in
      `program.evaluate` each worker uses its own on its part of the data. For the mean of all replicas call
      `collectives.strategies.average(program, strategy)`.

    Raises:
      CollectiveError: an argument is not an optimizer or not a schedule.

    Example:
      >>> strategy = sync.pair_averaging(optax.sgd(0.1), "ring")                   # doctest: +SKIP

    References:
      Lian et al. 2018, "Asynchronous decentralized parallel stochastic gradient descent", ICML.
      Lian et al. 2017, "Can decentralized algorithms outperform centralized algorithms?", NeurIPS, algorithm 1.
    """
    check_optimizer("pair_averaging", optimizer)
    schedule_of("pair_averaging", schedule, known_capacity())

    def init(params: Any) -> PairAveraging:
        params = arrays(params)
        return PairAveraging(params, optimizer.init(params), jnp.asarray(False), jnp.asarray(False))

    def update(state: PairAveraging, grads: Any, when: jax.Array | None) -> tuple[PairAveraging, None]:
        knows = state.knows | ~state.begun  # in the first step all replicas are equal
        mean, met = _mean_of_those_who_know(state.params, knows, schedule, when)
        updates, opt_state = optimizer.update(local_mean(grads), state.opt_state, state.params)
        params = select(knows, plus(mean, updates), mean)
        opt_state = select(knows, opt_state, state.opt_state)
        return PairAveraging(params, opt_state, knows | met, jnp.asarray(True)), None

    return one_step(
        "pair_averaging",
        init=init,
        replica=lambda state: state.params,
        update=update,
        per_worker_state=lambda state: (state.params, state.opt_state, state.knows),
        model=lambda state: state.params,
        kind=PairAveraging,
        counts=lambda state: state.knows | ~state.begun,
    )


def _mean_of_those_who_know(
    params: Any, knows: jax.Array, schedule: Schedule, when: jax.Array | None
) -> tuple[Any, jax.Array]:
    """Return the mean over trained neighbors (the worker's own value if there are none), and whether there are any."""
    own = knows.astype(jnp.float32)
    counted = jax.tree.map(lambda p: p * own.astype(p.dtype), params)
    total, share = neighbor_mean((counted, own), schedule, when=when)
    met = share > 0
    return select(met, jax.tree.map(lambda t: t / jnp.where(met, share, 1).astype(t.dtype), total), params), met
