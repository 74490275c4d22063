"""`model_averaging`: a replica per worker, pulled towards a central model that follows the replicas' mean."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax

import adaptive as ad
from adaptive.base.values.numbers import real
from collectives._leaves import error
from collectives._local_mean import local_mean
from collectives.compression._wire import Wire, check_format, codec_of

from ._strategy import Strategy, one_step
from ._trees import all_reduced, arrays, check_optimizer, minus, plus, zeros


class ModelAveraging(NamedTuple):
    """State of `model_averaging`: a central model, and each worker's difference from it.

    A joining worker has the initial local state, a difference of zero, so it starts at the central model.
    """

    center: Any  # z. Replicated
    velocity: Any  # z - z_prev, the change in the last step; () without momentum. Replicated
    apart: Any  # w_i - z. Local
    opt_state: Any  # Local


def model_averaging(
    optimizer: optax.GradientTransformation,
    *,
    alpha: float | None = None,
    momentum: float = 0.0,
    wire: Wire | None = None,
) -> Strategy:
    """Return the synchronous model averaging strategy: each worker's replica w_i is pulled towards a central model z.

        c_i = alpha (w_i - z)                                       the correction
        w_i <- w_i + u_i - c_i                                      u_i: the optimizer's update, -gamma g_i(w_i) of SGD
        z'  = z + n sum_i (b_i / B) c_i + momentum (z - z_prev)     with b_i examples of B, on n workers

    With equal batches this is Crossbow's algorithm 1, where all c_i have equal weights. With uneven batches the central
    model weights c_i by examples, so a replica trained on few examples has little influence. The pull alpha is the
    same for all replicas, because those with few examples would otherwise drift away. A worker without examples keeps
    its difference from z. Sends as many bytes as synchronous SGD. Suits many workers with small batches, which
    synchronous SGD combines to one large batch.

    Args:
      optimizer: an optax optimizer; its state is per worker.
      alpha: fraction of its difference from z that a replica loses in a step; above 0, at most 1. By default 1 / n with
        n workers that have examples: z' is then the replicas' mean, without momentum.
      momentum: momentum of the central model; at least 0, below 1.
      wire: a format for the differences, `jnp.bfloat16`, rounded to the nearest. See `collectives.all_reduce`.

    Returns:
      A `Strategy`. Its model is z, replicated. To measure the replicas' distance from z, call
      `mon.replica_distance(strategy.replica(state), average=strategy.model(state))`.

    Raises:
      CollectiveError: `optimizer` is not an optimizer, or another option is out of range.

    Example:
      >>> strategy = sync.model_averaging(optax.sgd(0.1), momentum=0.9)            # doctest: +SKIP

    References:
      Koliousis et al. 2019, "Crossbow: Scaling deep learning with small batch sizes on multi-GPU servers", VLDB,
      algorithm 1. KungFu's optimizer of this kind pulls replicas towards their mean, without a central model.
      Zhang, Choromanska and LeCun 2015, "Deep learning with elastic averaging SGD".
    """
    check_optimizer("model_averaging", optimizer)
    if wire is not None:
        check_format("model_averaging", wire, "nearest")
        if codec_of(wire):
            raise error("model_averaging", f"wire={wire} needs error feedback, which it has not. Use jnp.bfloat16.")
    _check_options(alpha, momentum)

    def init(params: Any) -> ModelAveraging:
        params = arrays(params)
        return ModelAveraging(params, zeros(params) if momentum else (), zeros(params), optimizer.init(params))

    def update(state: ModelAveraging, grads: Any, when: jax.Array | None) -> tuple[ModelAveraging, None]:
        # The weight is the local batch's size, not a microbatch's: the difference is the same in all microbatches.
        mean = all_reduced(state.apart, when, weight=ad.batch_size(), wire=wire)
        n = ad.num_workers()
        if alpha is None:
            pulled, moved = jax.tree.map(lambda x: x / n.astype(x.dtype), state.apart), mean
        else:
            pulled = jax.tree.map(lambda x: x * alpha, state.apart)
            moved = jax.tree.map(lambda x: x * alpha * n.astype(x.dtype), mean)
        if momentum:
            moved = jax.tree.map(lambda x, v: x + momentum * v, moved, state.velocity)
        updates, opt_state = optimizer.update(local_mean(grads), state.opt_state, replica(state))
        apart = minus(plus(minus(state.apart, pulled), updates), moved)
        return ModelAveraging(plus(state.center, moved), moved if momentum else (), apart, opt_state), None

    def replica(state: ModelAveraging) -> Any:
        return plus(state.center, state.apart)

    return one_step(
        "model_averaging",
        init=init,
        replica=replica,
        update=update,
        per_worker_state=lambda state: (state.apart, state.opt_state),
        model=lambda state: state.center,
        kind=ModelAveraging,
    )


def _check_options(alpha: Any, momentum: Any) -> None:
    number = real(alpha) if alpha is not None else None
    if alpha is not None and (number is None or not 0 < number <= 1):
        raise error("model_averaging", f"alpha={alpha!r} must be above 0 and at most 1; the default is 1 / workers.")
    number = real(momentum)
    if number is None or not 0 <= number < 1:
        raise error("model_averaging", f"momentum={momentum!r} must be at least 0 and below 1.")
