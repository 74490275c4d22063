"""`quorum`: rounds that end when most workers have taken their local steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import adaptive as ad
from adaptive.base.values.numbers import real
from adaptive.operators.round_clock import takes_another_step
from adaptive.operators.sources import EXAMPLES, read
from collectives._all_reduce import all_reduce
from collectives._leaves import error
from collectives.compression._wire import Rounding, Wire

from ._diloco import local_step
from ._strategy import Stepped, Strategy, ValueAndGrad
from ._trees import arrays, check_count, check_optimizer, minus, rounding_of, select, zeros


class Quorum(NamedTuple):
    """State of `quorum`: the replicated model, and each worker's change that no round has counted yet.

    A joining worker has the initial local state, a difference of zero, so it starts at the model.
    """

    params: Any  # z. Replicated
    outer: Any  # the outer optimizer's state. Replicated
    counted: Any  # workers whose change the last step took; 0 if it has not closed a round. int32. Replicated
    behind: Any  # z - x_i: this worker's change since one was last taken. Local
    inner: Any  # the inner optimizer's state. Local
    taken: Any  # local steps of which `behind` is the result, int32. Local
    examples: Any  # of these steps. Local


def quorum(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    steps: int,
    *,
    quorum: int | None = None,
    grace: float = 0.1,
    wire: Wire | None = None,
    rounding: Rounding = "nearest",
) -> Strategy:
    """Return a strategy of rounds that end when a quorum of the workers has taken its local steps.

        x_i = z - e_i, then local steps of `inner` until the round ends     e_i <- z - x_i
        z   <- outer's update by  sum_i w_i e_i / sum_i w_i,  e_i <- 0      over workers with `steps` steps or more

    A round is one step of the program. A worker that is late ends its local steps with the others, and keeps its change
    e_i. It adds to e_i in its next rounds, from the model of then, and is counted in the first round in which it
    has taken `steps` local steps in all. The weights are w_i = t_i / s_i, with s_i steps on t_i examples: e_i is a sum
    of s_i gradients, each a mean over t_i / s_i examples, so every example counts alike. With equal batches all weights
    are equal.

    Between two local steps, workers compare how long each needs for its steps, by its own clock, and a late one takes
    none that would end after the quorum and the grace period. So the others wait at most for the end of a local step
    that took longer than expected. A worker takes at least one local step in each round. All still meet at the
    end of the round: one that is stopped within a local step is waited for. Which changes are counted is agreed there,
    and if fewer than the quorum have taken their steps, all keep their changes.

    Examples that a late worker has not come to are skipped. Its seconds are those of the steps that it has taken.
    Leaving and lost workers take their e_i with them; joining ones begin with z and e_i = 0.

    Args:
      inner: an optax optimizer; its state is per worker and kept from round to round.
      outer: an optax optimizer; its state is replicated. See `diloco`.
      steps: local steps that a worker takes for its change to be counted, and most that it takes in a round. Local
        batches are multiples of it.
      quorum: number of workers that close a round, of those with examples. By default, half of these (rounded up) and
        one more. At least a majority is needed, and all suffice.
      grace: for how long a round stays open after the quorum, relative to its duration until then.
      wire: a format for e: `jnp.bfloat16`, "8bit", "4bit" or "2bit". See `collectives.all_reduce`.
      rounding: to that format: "nearest" or "stochastic".

    Returns:
      A `Strategy`; its loss is the mean over the local steps that this worker has taken. Its model is z. The number of
      workers whose changes the last step took is `state.counted`.

    Raises:
      CollectiveError: an argument is not an optimizer or out of range, or `wire` or `rounding` is not supported.

    Example:
      >>> outer = optax.sgd(0.7, momentum=0.9, nesterov=True)                     # doctest: +SKIP
      >>> strategy = sync.quorum(optax.adamw(4e-4), outer, steps=50)              # doctest: +SKIP

    References:
      "Decoupled DiLoCo", arXiv 2604.21428: learners that do not wait for each other, and rounds that a quorum closes.
      Its weights, t_i² / s_i, favor workers with more steps; here these are the late ones, whose gradients are older.
    """
    check_optimizer("quorum", inner, "inner")
    check_optimizer("quorum", outer, "outer")
    check_count("quorum", "steps", steps)
    check_count("quorum", "quorum", 1 if quorum is None else quorum)
    patience = real(grace)
    if patience is None or not 0 <= patience < float("inf"):
        raise error("quorum", f"grace={grace!r} must be 0 or more: a share of a round's duration, such as 0.1.")
    if rounding == "error_feedback":  # a round's sum contains the changes of other workers than the one before
        raise error(
            "quorum",
            'rounding="error_feedback" would mix what different exchanges send: rounding="stochastic" or "nearest".',
        )
    given = None if wire is None and rounding == "nearest" else rounding
    how: dict[str, Any] = {"wire": wire, "rounding": rounding_of("quorum", wire, given)}

    def init(params: Any) -> Quorum:
        params, none = arrays(params), jnp.zeros((), jnp.int32)
        return Quorum(
            params, outer.init(params), none, zeros(params), inner.init(params), none, jnp.zeros((), jnp.float32)
        )

    def take(state: Quorum, value_and_grad: ValueAndGrad, batch: Any) -> Stepped:
        needed, each = _needed(ad.num_workers(), quorum), jnp.asarray(read(EXAMPLES), jnp.float32) / steps
        own, loss = _local_steps(inner, steps, needed, patience, state, value_and_grad, batch)
        taken, examples = state.taken + own.taken, state.examples + own.taken.astype(jnp.float32) * each
        behind, done = minus(state.params, own.params), taken >= steps
        # If no worker is done, the mean must be 0, not 0 / 0.
        weight = jnp.where(done, examples / taken.astype(jnp.float32), 1e-20)
        change = all_reduce(select(done, behind, zeros(behind)), weight=weight, **how)
        number = all_reduce(done.astype(jnp.int32), op="sum")
        closes = number >= needed
        updates, outer_state = outer.update(change, state.outer, state.params)
        params = select(closes, optax.apply_updates(state.params, updates), state.params)
        outer_state = select(closes, outer_state, state.outer)
        counted, kept = jnp.where(closes, number, 0), ~(done & closes)
        behind = select(kept, behind, zeros(behind))
        taken, examples = jnp.where(kept, taken, 0), jnp.where(kept, examples, 0)
        return Quorum(params, outer_state, counted, behind, own.inner, taken, examples), loss, None, None

    return Strategy(
        "quorum",
        init,
        take,
        per_worker_state=lambda state: (state.behind, state.inner, state.taken, state.examples),
        model=lambda state: state.params,
        kind=Quorum,
    )


class _Replica(NamedTuple):
    """A worker's replica after some local steps. Local."""

    params: Any
    inner: Any
    taken: jax.Array  # local steps in this round, int32


def _local_steps(
    inner: optax.GradientTransformation,
    steps: int,
    needed: jax.Array,
    grace: float,
    state: Quorum,
    value_and_grad: ValueAndGrad,
    batch: Any,
) -> tuple[_Replica, Any]:
    """Take local steps from the worker's replica until the round ends. Return it, and the mean loss of the steps."""
    minibatches, step = ad.minibatches(batch, steps), local_step(inner, value_and_grad)

    def one(own: _Replica) -> tuple[_Replica, Any]:
        minibatch = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, own.taken, keepdims=False), minibatches)
        (params, opt_state), loss = step((own.params, own.inner), minibatch)
        return _Replica(params, opt_state, own.taken + 1), loss

    def goes_on(carry: tuple[_Replica, Any]) -> jax.Array:
        taken = carry[0].taken
        # Called also after the last step, where it publishes that this worker has finished.
        another = takes_another_step(steps - state.taken - taken, taken, needed, grace, "sync.quorum")
        return another & (taken < steps)

    def further(carry: tuple[_Replica, Any]) -> tuple[_Replica, Any]:
        own, loss = one(carry[0])
        return own, jax.tree.map(lambda total, x: total + x.astype(total.dtype), carry[1], loss)

    start = _Replica(minus(state.params, state.behind), arrays(state.inner), jnp.zeros((), jnp.int32))
    shapes = jax.eval_shape(one, start)[1]
    none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype if _is_wide(x.dtype) else jnp.float32), shapes)
    own, total = jax.lax.while_loop(goes_on, further, (start, none))

    def mean(x: jax.Array, shape: Any) -> jax.Array:
        return (x / own.taken.astype(x.dtype)).astype(
            shape.dtype if jnp.issubdtype(shape.dtype, jnp.inexact) else x.dtype
        )

    return own, jax.tree.map(mean, total, shapes)


def _is_wide(dtype: Any) -> bool:
    """Return whether sums of many numbers of a dtype are accurate in it."""
    return jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4


def _needed(workers: jax.Array, quorum: int | None) -> jax.Array:
    """Return how many of the workers close a round. Replicated."""
    workers = jnp.asarray(workers, jnp.int32)
    wanted = (workers + 1) // 2 + 1 if quorum is None else jnp.int32(quorum)
    return jnp.minimum(jnp.maximum(wanted, workers // 2 + 1), workers)
