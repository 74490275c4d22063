"""`diloco`: rounds of local steps, whose averaged change is the gradient of an outer optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import adaptive as ad
from collectives._all_reduce import all_reduce
from collectives.compression._wire import Rounding, Wire

from ._strategy import Stepped, Strategy, ValueAndGrad
from ._trees import arrays, check_count, check_optimizer, minus, rounding_of


class Rounds(NamedTuple):
    """State of `diloco` and `local_steps`: a model that is replicated between rounds, and two optimizer states."""

    params: Any  # Replicated
    outer: Any  # the outer optimizer's state. Replicated
    inner: Any  # the inner optimizer's state. Local


def diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    steps: int,
    *,
    wire: Wire | None = None,
    rounding: Rounding | None = None,
    hosts: Iterable[Iterable[int]] | None = None,
) -> Strategy:
    """Return the DiLoCo strategy: local steps by an inner optimizer, then one common step by an outer optimizer.

        x_i = z, followed by `steps` steps of `inner` on minibatches of worker i's examples
        z <- z + outer's update by the gradient  z - sum_i b_i x_i / sum_i b_i          b_i: examples of worker i

    A round is one step of the program (see docs/federated.md). It sends the parameters' bytes once. The model is
    replicated between rounds. Local batches are multiples of `steps`.

    Args:
      inner: an optax optimizer; its state is per worker and kept from round to round. AdamW in the paper.
      outer: an optax optimizer; its state is replicated. In the paper `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
      steps: local steps in a round.
      wire: a format for the outer gradient: `jnp.bfloat16`, "8bit", "4bit" or "2bit". See `collectives.all_reduce`. In
        trials with one small model, "4bit" worked with an outer momentum of 0.9, and "2bit" with 0.5.
      rounding: how to round to `wire`; see `collectives.all_reduce`. By default "error_feedback" for compressed
        formats, and "nearest" for others.
      hosts: the workers of each host, for compressed formats: `comm.by_host(world)`. The changes of a host's workers
        are then averaged exactly, and one of them sends. See `collectives.all_reduce`.

    Returns:
      A `Strategy`; its loss is the mean over the round's steps.

    Raises:
      CollectiveError: an argument is not an optimizer, `steps` is not a positive integer, or `wire` or `rounding` is
        not supported. An invalid `hosts` raises when the driver is traced.

    Example:
      >>> outer = optax.sgd(0.7, momentum=0.9, nesterov=True)                         # doctest: +SKIP
      >>> strategy = sync.diloco(optax.adamw(4e-4), outer, steps=50, wire="4bit")     # doctest: +SKIP

    References:
      Douillard et al. 2023, "DiLoCo: Distributed low-communication training of language models", algorithm 1.
    """
    check_optimizer("diloco", inner, "inner")
    check_optimizer("diloco", outer, "outer")
    return rounds("diloco", inner, outer, steps, wire, rounding, hosts)


def rounds(
    name: str,
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    steps: int,
    wire: Wire | None,
    rounding: Rounding | None,
    hosts: Iterable[Iterable[int]] | None,
) -> Strategy:
    """Return a strategy of rounds: local steps by `inner`, then a common step by `outer`. `name` is for errors.

    Raises:
      CollectiveError: `steps` is not a positive integer, or `wire` or `rounding` is not supported.
    """
    check_count(name, "steps", steps)
    how: dict[str, Any] = {"wire": wire, "rounding": rounding_of(name, wire, rounding), "hosts": hosts}

    def init(params: Any) -> Rounds:
        params = arrays(params)
        return Rounds(params, outer.init(params), inner.init(params))

    def take(state: Rounds, value_and_grad: ValueAndGrad, batch: Any) -> Stepped:
        (params, opt_state), losses = inner_steps(inner, steps, state.params, state.inner, value_and_grad, batch)
        gradient = all_reduce(minus(state.params, params), **how)
        updates, outer_state = outer.update(gradient, state.outer, state.params)
        new = Rounds(optax.apply_updates(state.params, updates), outer_state, opt_state)
        return new, jax.tree.map(lambda x: x.mean(0), losses), None, None

    return Strategy(
        name,
        init,
        take,
        per_worker_state=lambda state: state.inner,
        model=lambda state: state.params,
        kind=Rounds,
    )


def inner_steps(
    inner: optax.GradientTransformation,
    steps: int,
    params: Any,
    opt_state: Any,
    value_and_grad: ValueAndGrad,
    batch: Any,
) -> tuple[tuple[Any, Any], Any]:
    """Take local steps on minibatches of the batch. Return `((params, opt_state), losses)`, with the loss of each."""
    step = local_step(inner, value_and_grad)
    return jax.lax.scan(step, arrays((params, opt_state)), ad.minibatches(batch, steps))


def local_step(inner: optax.GradientTransformation, value_and_grad: ValueAndGrad) -> Callable[..., Any]:
    """Return a local step for loops: `((params, opt_state), minibatch) -> ((params, opt_state), loss)`."""

    def step(carry: tuple[Any, Any], minibatch: Any) -> tuple[tuple[Any, Any], Any]:
        params, opt_state = carry
        loss, grads = value_and_grad(params, minibatch)
        updates, opt_state = inner.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), opt_state
        return jax.tree.map(lambda x, before: jnp.asarray(x).astype(before.dtype), new, carry), loss  # as loops need

    return step
