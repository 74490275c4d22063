"""`synchronous`: one replicated model, updated with the mean gradient over all examples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import jax
import optax

from collectives._robust import Robust
from collectives.compression._wire import Rounding, Wire

from ._strategy import Strategy, one_step
from ._trees import all_reduced, arrays, check_optimizer


class Synchronous(NamedTuple):
    """State of `synchronous`: a model that is the same on all workers. Replicated."""

    params: Any
    opt_state: Any


def synchronous(
    optimizer: optax.GradientTransformation,
    *,
    op: Literal["mean", "median"] | Robust = "mean",
    nonfinite: Literal["drop"] | None = None,
    wire: Wire | None = None,
    rounding: Rounding = "nearest",
    hosts: Iterable[Iterable[int]] | None = None,
) -> Strategy:
    """Return the synchronous SGD strategy: one replicated model, updated with the mean gradient over all examples.

    The step equals that of one worker with all the examples, whatever the split. It sends the gradients in every step
    and waits for the slowest worker. All monitors and policies support it.

    Args:
      optimizer: an optax optimizer.
      op: see `collectives.all_reduce`. "median", `comm.trimmed_mean(1)` and `comm.geometric_median()` are robust
        against workers that send wrong gradients.
      nonfinite: see `collectives.all_reduce`.
      wire: see `collectives.all_reduce`.
      rounding: see `collectives.all_reduce`.
      hosts: see `collectives.all_reduce`.

    Returns:
      A `Strategy`. Its whole state is replicated.

    Raises:
      CollectiveError: `optimizer` is not an optimizer. Invalid reductions raise when the driver is traced.

    Example:
      >>> strategy = sync.synchronous(optax.adam(1e-3), wire=jnp.bfloat16)            # doctest: +SKIP
    """
    check_optimizer("synchronous", optimizer)
    options: dict[str, Any] = {"op": op, "nonfinite": nonfinite, "wire": wire, "rounding": rounding, "hosts": hosts}

    def init(params: Any) -> Synchronous:
        return Synchronous(arrays(params), optimizer.init(params))

    def update(state: Synchronous, grads: Any, when: jax.Array | None) -> tuple[Synchronous, Any]:
        avg_grads = all_reduced(grads, when, **options)
        updates, opt_state = optimizer.update(avg_grads, state.opt_state, state.params)
        return Synchronous(optax.apply_updates(state.params, updates), opt_state), avg_grads

    return one_step(
        "synchronous",
        init=init,
        replica=lambda state: state.params,
        update=update,
        per_worker_state=lambda state: (),
        model=lambda state: state.params,
        kind=Synchronous,
    )
