"""The interface of strategies: functions of a state that a program keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaptive import CollectiveError, Program
from adaptive.base.roster import with_same_members
from collectives._leaves import error

ValueAndGrad = Callable[[Any, Any], tuple[Any, Any]]
Stepped = tuple[Any, Any, Any, Any]  # state, loss, this worker's gradients, their mean over all workers


@dataclass(frozen=True)
class Strategy:
    """A strategy that synchronizes the workers' models. Made by the functions of `collectives.strategies`.

        strategy = sync.model_averaging(optax.sgd(0.1))

        def driver(state, batch):
            state, loss = strategy.step(state, jax.value_and_grad(loss_fn), batch)
            return state, {"loss": comm.all_reduce(loss)}

        program = ad.Program(driver, strategy.init(params), data, global_batch=128,
        per_worker_state=strategy.per_worker_state)

    Attributes:
      name: the strategy's name in error messages.
      init: `init(params) -> state`: makes the program's initial state. A named tuple, as optimizers' states are.
      take: `take(state, value_and_grad, batch) -> (state, loss, grads, avg_grads)`: takes a step, or a round of local
        steps; `avg_grads` is `None` if the strategy averages no gradients.
      per_worker_state: selects the local part of the state, for `ad.Program(...,
        per_worker_state=strategy.per_worker_state)`.
      model: selects the parameters to evaluate and to save. For `pair_averaging` a replica, see `average`.
      replica: selects the parameters at which this worker's gradients are computed; `None` if a step is a round.
      update: `update(state, grads, when) -> (state, avg_grads)`, for `hybrid`: applies gradients, and sends its
        collectives only if `when` is true; `when=None` means always.
      counts: returns whether `average` includes this replica; `None` means always.
      kind: type of the state, a named tuple of its own: other types are rejected, and `find` looks for it.

    Raises:
      CollectiveError: by its functions, if they get a state that is not of type `kind`.

    Example:
      >>> import jax, jax.numpy as jnp, optax, collectives.strategies as sync
      >>> strategy = sync.synchronous(optax.sgd(0.1))
      >>> loss_fn = lambda params, batch: ((params - batch) ** 2).mean()
      >>> state, loss = strategy.step(strategy.init(jnp.ones(())), jax.value_and_grad(loss_fn), jnp.zeros(4))
      >>> print(loss, strategy.model(state))  # outside a program: one worker
      1.0 0.8
    """

    name: str
    init: Callable[[Any], Any]
    take: Callable[[Any, ValueAndGrad, Any], Stepped]
    per_worker_state: Callable[[Any], Any]
    model: Callable[[Any], Any]
    kind: type
    replica: Callable[[Any], Any] | None = None
    update: Callable[[Any, Any, jax.Array | None], tuple[Any, Any]] | None = None
    counts: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        for name in ("take", "per_worker_state", "model", "replica", "update", "counts"):
            function = getattr(self, name)
            if function is not None:
                object.__setattr__(self, name, self._checked(name, function))

    def _checked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def of_kind(state: Any, *args: Any, **options: Any) -> Any:
            if not isinstance(state, self.kind):
                raise self._not_of_kind("step" if name == "take" else name, state)
            return function(state, *args, **options)

        return of_kind

    def _not_of_kind(self, what: str, state: Any) -> CollectiveError:
        kind, within = self.kind, self._within(state)
        advice = f"Its state is  state{next(iter(within))}" if within else "Pass the result of strategy.init(params)."
        return error(f"{self.name}.{what}", f"needs a {kind.__name__}, and got a {type(state).__name__}. {advice}")

    def _within(self, state: Any) -> dict[str, Any]:
        """Return the states of this strategy inside a larger state, keyed by path; "" stands for the whole state."""
        kind = self.kind
        nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda node: isinstance(node, kind))
        return {jax.tree_util.keystr(path): node for path, node in nodes if isinstance(node, kind)}

    def find(self, state: Any) -> Any:
        """Return the strategy's state from a larger state, such as a dict with other entries.

        Args:
          state: any pytree; the strategy's own state is returned as it is.

        Raises:
          CollectiveError: the larger state holds no state of this strategy, or several.
        """
        found = self._within(state)
        if len(found) == 1:
            return next(iter(found.values()))
        what = f"no {self.kind.__name__}, which strategy.init(params) makes; it is a {type(state).__name__}"
        if found:
            what = f"{len(found)} states of type {self.kind.__name__}: state{', state'.join(found)}. Pick one"
        raise error(self.name, f"the program's state has {what}.")

    def step(self, state: Any, value_and_grad: ValueAndGrad, batch: Any) -> tuple[Any, Any]:
        """Take a step of the strategy; called in the driver.

        Args:
          state: the strategy's state.
          value_and_grad: `value_and_grad(params, batch) -> (loss, grads)`, of means over the batch, as
            `jax.value_and_grad(loss_fn)` returns. With `has_aux=True` the loss is a pair, here too.
          batch: the driver's batch.

        Returns:
          `(state, loss)`. The loss is that of this worker's replica before the step; for a round, the mean over its
          local steps. Local: reduce it for metrics and hooks.
        """
        state, loss, _, _ = self.take(state, value_and_grad, batch)
        return state, loss

    def step_with_gradients(self, state: Any, value_and_grad: ValueAndGrad, batch: Any) -> Stepped:
        """Take a step and return its gradients, for monitors: `mon.noise_scale(grads, avg_grads)`. No extra cost.

        Args:
          state: see `step`.
          value_and_grad: see `step`.
          batch: see `step`.

        Returns:
          `(state, loss, grads, avg_grads)`. `avg_grads` is replicated, `loss` and `grads` are local.

        Raises:
          CollectiveError: the strategy averages no gradients; only `synchronous` does.
        """
        taken = self.take(state, value_and_grad, batch)
        if taken[3] is None:
            raise error(
                f"{self.name}.step_with_gradients",
                f"{self.name} averages no gradients, which mon.noise_scale and mon.gradient_variance need. Use\n"
                "    strategy = sync.synchronous(optimizer)\n"
                "or measure how far replicas are apart:  mon.replica_distance(…)",
            )
        return taken


def one_step(
    name: str,
    *,
    init: Callable[[Any], Any],
    replica: Callable[[Any], Any],
    update: Callable[[Any, Any, jax.Array | None], tuple[Any, Any]],
    per_worker_state: Callable[[Any], Any],
    model: Callable[[Any], Any],
    kind: type,
    counts: Callable[[Any], Any] | None = None,
) -> Strategy:
    """Return a strategy whose step computes one gradient at the worker's replica."""

    def take(state: Any, value_and_grad: ValueAndGrad, batch: Any) -> Stepped:
        loss, grads = value_and_grad(replica(state), batch)
        state, avg_grads = update(state, grads, None)
        return state, loss, grads, avg_grads

    return Strategy(name, init, take, per_worker_state, model, kind, replica, update, counts)


def average(program: Program, strategy: Strategy, *, state: Callable[[Any], Any] | None = None) -> Any:
    """Return the mean of all replicas with equal weights: the model to save after `pair_averaging`.

    If the strategy's model is replicated, the result is that model. Communicates once. Every process must call this,
    between two steps.

    Args:
      program: the program that has run the strategy.
      strategy: the strategy. Its state is the program's state or a part of it.
      state: selects the strategy's state, if the program's state contains several: `lambda state: state["teacher"]`.

    Returns:
      The mean parameters, as numpy arrays of the parameters' dtypes; computed in double precision. Replicated.

    Example:
      >>> params = sync.average(program, strategy)            # doctest: +SKIP

    Raises:
      NonFiniteError: the last update produced NaNs.
      CollectiveError: the program's state holds no state of this strategy, or more than one.
    """
    pick = strategy.find if state is None else state
    pick(program.state)  # raises the caller's errors before anything is sent

    def counted(whole: Any, _: Any) -> Any:
        own = pick(whole)
        here = jnp.asarray(strategy.counts is None or strategy.counts(own), jnp.float32)
        return here, jax.tree.map(lambda p: p * here.astype(p.dtype), strategy.model(own))

    def evaluated() -> tuple[Any, Any]:
        # One example per worker, so that each contributes its replica once.
        there = set(program.members) & set(program.world.members)
        return program.evaluate(counted, np.zeros(len(there), np.float32), batch=1)

    share, total = with_same_members(program.world, evaluated)
    shapes = jax.eval_shape(lambda whole: strategy.model(pick(whole)), program.state)
    return jax.tree.map(lambda x, like: (x / share).astype(like.dtype), total, shapes)
