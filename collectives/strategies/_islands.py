"""`islands`: exact averages within groups of workers, and rounds between the groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import adaptive as ad
from adaptive.operators.sources import EXAMPLES, read
from collectives._islands import checked_islands, island_sum
from collectives._leaves import known_capacity
from collectives.compression._wire import Rounding, Wire

from ._strategy import Stepped, Strategy, ValueAndGrad
from ._trees import all_reduced, arrays, check_count, check_optimizer, minus, rounding_of, scaled, select


class Islands(NamedTuple):
    """State of `islands`: a model that is the same on all workers at the ends of rounds, and each island's replica."""

    params: Any  # z, as of the last round. Replicated
    outer: Any  # the outer optimizer's state. Replicated
    taken: Any  # steps taken, int32. Replicated
    replica: Any  # x, the island's parameters. Local, and equal on the workers of an island
    inner: Any  # the inner optimizer's state. Local, and equal on the workers of an island
    seen: Any  # steps of which `replica` is the result, int32; a worker with fewer than `taken` waits. Local
    examples: Any  # that the island has taken in this round. Local
    island: Any  # least worker of the island of which `replica` is, int32; -1 at first. Local


def islands(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    steps: int,
    islands: Iterable[Iterable[int]],
    *,
    wire: Wire | None = None,
    rounding: Rounding | None = None,
) -> Strategy:
    """Return a strategy of two levels: gradients are averaged within islands, and models between them by rounds.

        x_I <- inner's update by  sum_{i in I} b_i g_i / sum_{i in I} b_i          in every step, on all of island I
        z   <- outer's update by  z - sum_I B_I x_I / sum_I B_I,  x_I <- z         in every `steps`-th step

    where B_I are the island's examples in the round. Islands are groups of workers with fast links between them, such
    as the workers of a host. Within an island a step equals that of one worker with all its examples; the parameters'
    bytes go between islands once in `steps` steps, from one worker of each. Islands of one worker make `diloco`.
    With a single island nothing is exchanged: its replica trains as in `synchronous`, and z follows.

    A step of the program is a local step, not a round: its batch may have any size, be split into microbatches, and
    change in any step. Workers of an island have equal parameters and inner state, so a lost worker loses none of
    them. A joining worker, or one that had no examples for a step, waits for the end of the round: until then its
    examples do not count, and then it has the state of its island; if its island has no other worker, it starts in
    the next step with z and the initial inner state.

    Args:
      inner: an optax optimizer; its state is each island's.
      outer: an optax optimizer; its state is replicated. In the paper `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
      steps: steps of the program in a round. A round ends after each step whose number is a multiple of it.
      islands: the workers of each island: `[[0, 1], [2, 3]]`, or `comm.by_host(world)`.
      wire: a format for what travels between islands. See `diloco`.
      rounding: to that format. See `diloco`.

    Returns:
      A `Strategy`; its loss is that of this worker's batch before the step. Its model is z, as of the last round.
      `step_with_gradients` returns the island's mean gradient, for `mon.noise_scale(grads, avg_grads, islands=…)`;
      both are local, and the worker's own is NaN while it waits.

    Raises:
      CollectiveError: an argument is not an optimizer, `steps` is not a positive integer, a worker is in no island or
        in two, or `wire` or `rounding` is not supported.

    Example:
      >>> outer = optax.sgd(0.7, momentum=0.9, nesterov=True)                                 # doctest: +SKIP
      >>> strategy = sync.islands(optax.adamw(4e-4), outer, 50, comm.by_host(world))          # doctest: +SKIP

    References:
      Douillard et al. 2023, "DiLoCo: Distributed low-communication training of language models", algorithm 1, whose
      workers are islands of devices.
    """
    check_optimizer("islands", inner, "inner")
    check_optimizer("islands", outer, "outer")
    check_count("islands", "steps", steps)
    groups = checked_islands("islands", islands, known_capacity())
    how: dict[str, Any] = {"wire": wire, "rounding": rounding_of("islands", wire, rounding)}

    def init(params: Any) -> Islands:
        params = arrays(params)
        none, opt_state = jnp.zeros((), jnp.int32), arrays(inner.init(params))
        nobody = jnp.full((), -1, jnp.int32)
        return Islands(params, outer.init(params), none, params, opt_state, none, jnp.zeros((), jnp.float32), nobody)

    def take(state: Islands, value_and_grad: ValueAndGrad, batch: Any) -> Stepped:
        checked_islands("islands", groups, known_capacity())
        loss, grads = value_and_grad(state.replica, batch)
        # Otherwise it has just joined, has had no examples, or was in another island before the program was restored.
        own_island = _least_of(groups)[ad.worker_index()]
        is_current = (state.seen == state.taken) & ((state.island == own_island) | (state.taken == 0))
        found = _within(groups, grads, is_current)
        updates, opt_state = inner.update(found.grads, state.inner, state.replica)
        replica = optax.apply_updates(state.replica, updates)
        moved = found.examples > 0
        own = _Own(select(moved, replica, state.replica), select(moved, opt_state, state.inner))
        examples = jnp.where(is_current, state.examples + found.examples, 0)
        new = _between(state, own, examples, found, is_current)._replace(island=own_island)
        # At the parameters of an earlier step a gradient tells nothing of noise; monitors leave out what is NaN.
        unknown = jax.tree.map(lambda g: jnp.where(is_current, g, jnp.asarray(jnp.nan, g.dtype)), grads)
        return new, loss, unknown, found.grads

    def _between(state: Islands, own: _Own, examples: jax.Array, found: _Found, is_current: jax.Array) -> Islands:
        """Return the state after the step: where it ends a round, after the exchange between islands."""
        ends = (ad.step_number() + 1) % steps == 0
        speaks, founds = is_current & (ad.worker_index() == found.first), ~found.has_current
        # Without examples, for instance because all workers have just joined, the mean of changes must be 0, not 0 / 0.
        weight = jnp.where(speaks | founds, jnp.maximum(examples, 1e-20), 0)
        moved = minus(state.params, select(is_current, own.replica, state.params))
        change = all_reduced(moved, ends, weight=weight, **how)
        number = all_reduced(speaks.astype(jnp.float32), ends, op="sum")
        given = island_sum(jax.tree.map(lambda x: jnp.where(speaks, x, jnp.zeros((), x.dtype)), own), groups, when=ends)
        alone = number <= 1

        def stepped() -> tuple[Any, Any]:
            updates, outer_state = outer.update(change, state.outer, state.params)
            followed = minus(state.params, change)
            return select(alone, (followed, state.outer), (optax.apply_updates(state.params, updates), outer_state))

        params, outer_state = jax.lax.cond(ends, stepped, lambda: (state.params, arrays(state.outer)))
        replica = select(ends, select(alone, given.replica, params), own.replica)
        # Workers that found an island together are to begin alike.
        first = params, arrays(inner.init(state.params))
        replica, opt_state = select(founds, first, (replica, select(ends, given.inner, own.inner)))
        seen = jnp.where(is_current | ends | founds, state.taken + 1, state.seen)
        examples = jnp.where(ends, 0, examples)
        return Islands(params, outer_state, state.taken + 1, replica, opt_state, seen, examples, state.island)

    return Strategy(
        "islands",
        init,
        take,
        per_worker_state=lambda state: (state.replica, state.inner, state.seen, state.examples, state.island),
        model=lambda state: state.params,
        replica=lambda state: state.replica,
        kind=Islands,
    )


def _least_of(groups: tuple[tuple[int, ...], ...]) -> jax.Array:
    """Return the least worker of each worker's island; shape=(capacity,), int32."""
    least = {worker: min(group) for group in groups for worker in group}
    return jnp.asarray([least[worker] for worker in sorted(least)], jnp.int32)


class _Own(NamedTuple):
    """What the workers of an island have in common. Local."""

    replica: Any
    inner: Any


class _Found(NamedTuple):
    """Sums within an island. Local."""

    grads: Any  # the mean over the examples of the workers that are current; zeros if there are none
    examples: jax.Array  # of these workers
    has_current: jax.Array  # whether there are any
    first: jax.Array  # the least of them


def _within(groups: tuple[tuple[int, ...], ...], grads: Any, is_current: jax.Array) -> _Found:
    capacity = sum(map(len, groups))
    weight = jnp.where(is_current, read(EXAMPLES), 0).astype(jnp.float32)
    row = (jnp.arange(capacity, dtype=jnp.int32) == ad.worker_index()) & is_current
    grads = jax.lax.optimization_barrier(grads)  # as in an `all_reduce`, so that XLA rounds them alike
    total, examples, row = island_sum((scaled(grads, weight), weight, row.astype(jnp.float32)), groups)
    has_current = row.sum() > 0
    divisor = jnp.where(examples > 0, examples, 1)
    mean = jax.tree.map(lambda x, own: (x / divisor.astype(x.dtype)).astype(own.dtype), total, grads)
    return _Found(mean, examples, has_current, jnp.argmax(row > 0).astype(jnp.int32))
