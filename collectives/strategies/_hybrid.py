"""`hybrid`: a strategy that a hook switches to another one."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

import adaptive as ad
from collectives._leaves import error

from ._strategy import Stepped, Strategy, ValueAndGrad
from ._trees import select


class Hybrid(NamedTuple):
    """State of `hybrid`: both strategies' states. The inactive one equals `init` of the active one's model."""

    first: Any
    then: Any


def hybrid(first: Strategy, then: Strategy) -> Strategy:
    """Return a strategy that runs `first` until a hook sets `synchronous=True`, and then `then`.

    The switch needs no compilation and no waiting: both strategies are in the driver, and each step sends only the
    active one's messages. Other reductions, such as the loss, are sent in messages of their own. At the switch all
    replicas are set to the central model, and the optimizer's state is initialized. Setting `synchronous=False`
    switches back. KungFu's AdaSGD, model averaging followed by synchronous SGD, instead switches at a fixed step and
    continues with one worker's replica.

        strategy = sync.hybrid(sync.model_averaging(optax.sgd(0.1)), sync.synchronous(optax.sgd(0.1)))

        def until_it_settles(control, loss):
            if loss < 0.3 and not control.hyperparameters["synchronous"]:
                control.set_hyperparameters(synchronous=True)

    Args:
      first: a strategy with one gradient per step and a replicated model: `model_averaging` or `synchronous`.
      then: another such strategy.

    Returns:
      A `Strategy`. Its state holds both states.

    Raises:
      CollectiveError: an argument is not a strategy, its step is a round, or its model is not replicated.

    References:
      Mai et al. 2020, "KungFu: Making training in distributed machine learning adaptive", OSDI; its
      AdaptiveSGDOptimizer.
    """
    for strategy in (first, then):
        _check(strategy)

    def init(params: Any) -> Hybrid:
        return Hybrid(first.init(params), then.init(params))

    def later() -> jax.Array:
        return ad.hyperparameter("synchronous", False)

    def update(state: Hybrid, grads: Any, when: jax.Array | None) -> tuple[Hybrid, Any]:
        on = later()
        before, after = (~on, on) if when is None else (when & ~on, when & on)
        a, _ = first.update(state.first, grads, before)  # type: ignore[misc]
        b, _ = then.update(state.then, grads, after)  # type: ignore[misc]
        a, b = select(on, first.init(then.model(b)), a), select(on, b, then.init(first.model(a)))
        return Hybrid(a, b), None

    def replica(state: Hybrid) -> Any:
        return select(later(), then.replica(state.then), first.replica(state.first))  # type: ignore[misc]

    def take(state: Hybrid, value_and_grad: ValueAndGrad, batch: Any) -> Stepped:
        loss, grads = value_and_grad(replica(state), batch)
        state, _ = update(state, grads, None)
        return state, loss, grads, None

    return Strategy(
        "hybrid",
        init,
        take,
        per_worker_state=lambda state: (first.per_worker_state(state.first), then.per_worker_state(state.then)),
        model=lambda state: then.model(state.then),  # while inactive it is initialized with the other's model
        replica=replica,
        kind=Hybrid,
    )


def _check(strategy: Any) -> None:
    if not isinstance(strategy, Strategy):
        raise error(
            "hybrid", f"{strategy!r} is not a strategy:  sync.hybrid(sync.model_averaging(…), sync.synchronous(…))"
        )
    if strategy.update is None:
        raise error(
            "hybrid",
            f"{strategy.name} takes several local steps per step, or is a hybrid. Both strategies must apply one "
            "gradient per step.",
        )
    if strategy.counts is not None:  # some replicas are no models
        raise error(
            "hybrid",
            f"{strategy.name} has no replicated model, which the switch needs. Use\n"
            "    sync.hybrid(sync.model_averaging(optimizer), sync.synchronous(optimizer))",
        )
