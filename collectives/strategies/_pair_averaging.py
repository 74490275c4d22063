"""`pair_averaging`: a replica for each worker, averaged with some others' in each step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from collectives._leaves import known_capacity
from collectives._local_mean import local_mean
from collectives._neighbor_mean import neighbor_mean
from collectives._schedules import Schedule, schedule_of

from ._strategy import Strategy, one_step
from ._trees import arrays, check_optimizer, plus, select


class PairAveraging(NamedTuple):
    """Each worker's replica, and whether it is of the run or as the program began."""

    params: Any  # Local
    opt_state: Any  # Local
    knows: Any  # a boolean: whether the replica has taken part. Local
    begun: Any  # a boolean: whether a step has been taken. Replicated, so who joins is told


def pair_averaging(optimizer: optax.GradientTransformation, schedule: Schedule = "random") -> Strategy:
    """Decentralised SGD: each worker trains a replica, and averages it with that of another one in each step.

        x_i <- mean_j W_ij x_j + u_i            u_i: the optimizer's update by the gradient at the old x_i

    AD-PSGD in lockstep: costs the parameters once (twice in a ring), to one other worker, however many there are; but a
    step's end is common to all, so all wait for the slowest, as in any step of a program.

    Replicas count alike, however many examples they have. Who joins has the parameters with which the program began, so
    it says that it knows nothing: in means it does not count, and it takes its neighbors' mean for its own, without an
    update, once it meets one that knows. Until then, one step or a few, its loss is that of the first parameters.
    Should all leave who know, there is nothing left to go on with. A worker without examples neither counts nor moves.

    Args:
      optimizer: of optax; each worker's own.
      schedule: who averages with whom, see `collectives.neighbor_mean`.

    Returns:
      A `Strategy`. Its model is a replica: in `program.state` that of this process's first worker, in
      `program.evaluate` each worker's own on its part of the data. The mean of all is
      `collectives.strategies.average(program, strategy)`.

    Raises:
      CollectiveError: that is no optimizer, or no schedule.

    Example:
      >>> strategy = sync.pair_averaging(optax.sgd(0.1), "exponential")            # doctest: +SKIP

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
        knows = state.knows | ~state.begun  # in the first step all are alike
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
    """The mean with those neighbors who know, or a worker's own where none does; and whether any does."""
    own = knows.astype(jnp.float32)
    counted = jax.tree.map(lambda p: p * own.astype(p.dtype), params)
    total, share = neighbor_mean((counted, own), schedule, when=when)
    met = share > 0
    return select(met, jax.tree.map(lambda t: t / jnp.where(met, share, 1).astype(t.dtype), total), params), met
