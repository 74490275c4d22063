"""Exact means over a data set, over all workers: no example twice, none left out, whatever the last batch's size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from adaptive.base.errors import DriverError
from adaptive.base.names import leaf_names
from adaptive.base.world import World
from adaptive.control.alike import digest_of_text, digest_of_tree
from adaptive.control.split import positive
from adaptive.control.together import together
from adaptive.data.examples import Rows
from adaptive.data.same_data import digest_of_data
from adaptive.data.shards import rows_of
from adaptive.graph.text import as_text

_AHEAD = 2  # batches per worker that are under way at once: one computes while the next is fetched
_SAME_ON_ALL = (
    "Every rank must evaluate the same function on the same whole data set, in batches of one size: "
    "evaluate itself deals the batches out over the workers."
)


def evaluate(
    fn: Callable,
    states: Sequence[Any],
    data: Any,
    world: World,
    batch: int,
    about: str = "",
    members: Sequence[int] | None = None,
) -> Any:
    """Means of `fn(state, batch)` over `data`, weighted by examples. Communicates once.

    Args:
      states: the user's state on the device of each worker of this process.
      data: as for `Program`.
      batch: examples in one call; the last one may be smaller.
      about: which evaluation this is, in words.
      members: the workers that take part; those of the world by default.

    Returns:
      A pytree of numpy arrays. Replicated, to the last bit.

    Raises:
      WorkerError: another process failed. On every other process.
      DisagreementError: processes differ in what they evaluate. On every process.
    """
    members = world.members if members is None else members
    there = (state for worker, state in zip(world.workers, states, strict=True) if worker in members)
    state = next(there, states[0])  # a process without workers traces what the others do
    whole: list[tuple[int, Any]] = []  # how many examples, and what fn returns

    def work() -> tuple[dict[str, str], list[np.ndarray]]:
        rows, each = rows_of(data), positive("batch", batch)
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(state, rows.shapes(min(each, len(rows))))
        _check_means(fn, shapes, state, rows, each)
        whole.append((len(rows), shapes))
        digests = _digests(closed, shapes, rows, each) if world.processes > 1 else {}
        return digests, _sums(fn, shapes, states, rows, world, those, each)

    generation, those = -1, list(members)
    while generation != world.generation:  # whoever was lost in the course of it had a part of the data
        generation = world.generation
        those = [worker for worker in members if worker in world.members]
        everyone = together(world, about, work, _SAME_ON_ALL)
    examples, shapes = whole[-1]
    means = [sum(sums) / examples for sums in zip(*everyone, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(shapes), means)


def _digests(closed: ClosedJaxpr, shapes: Any, rows: Rows, batch: int) -> dict[str, str]:
    """What has to be the same on all processes, by what it is called."""
    jaxpr = closed.jaxpr
    lines = [line.text for line in as_text([*jaxpr.invars, *jaxpr.constvars], jaxpr.eqns, jaxpr.outvars)]
    leaves = zip(leaf_names(shapes, ""), jax.tree.leaves(shapes), strict=True)
    return {
        "batch": str(batch),
        "the data set": digest_of_data(rows),
        "what fn returns": ", ".join(f"{name} {leaf.dtype}{list(leaf.shape)}".strip() for name, leaf in leaves),
        "fn": f"{len(jaxpr.eqns)} equations, {digest_of_text(repr((lines, digest_of_tree(closed.consts))))}",
    }


def _check_means(fn: Callable, shapes: Any, state: Any, data: Rows, batch: int) -> None:
    """That what `fn` returns for a whole batch it returns for one of any size."""
    full = min(batch, len(data))
    last = len(data) % full
    others = shapes
    if last:
        others = jax.eval_shape(fn, state, data.shapes(last))
    else:  # no other size comes, but of one that did, a mean would be as large; unless fn takes this size alone
        last = full + 1
        with suppress(Exception):
            others = jax.eval_shape(fn, state, data.shapes(last))
    leaves = zip(leaf_names(shapes, ""), jax.tree.leaves(shapes), jax.tree.leaves(others), strict=True)
    for name, leaf, other in leaves:
        if leaf.shape != other.shape:
            raise DriverError(
                f"evaluate: {name or 'what fn returns'} has shape {leaf.shape} for a batch of {full} examples and "
                f"{other.shape} for one of {last}. It must be a mean over the batch's examples:  jnp.mean(correct)"
            )


def _sums(
    fn: Callable,
    shapes: Any,
    states: Sequence[Any],
    data: Rows,
    world: World,
    members: Sequence[int],
    batch: int,
) -> list[np.ndarray]:
    """This process's part of the sums over all examples, in double precision; a list over leaves."""
    call = jax.jit(fn)
    sums = [np.zeros(leaf.shape, np.result_type(leaf.dtype, np.float64)) for leaf in jax.tree.leaves(shapes)]
    under_way: deque[tuple[int, list[jax.Array]]] = deque()

    def take_in() -> None:
        count, means = under_way.popleft()
        for total, mean in zip(sums, means, strict=True):
            total += count * np.asarray(mean).astype(total.dtype)

    for local, start, stop in _parts(len(data), batch, world, members):
        rows = jax.device_put(data.rows(np.arange(start, stop)), world.devices[local])
        under_way.append((stop - start, jax.tree.leaves(call(states[local], rows))))
        if len(under_way) > _AHEAD * len(states):
            take_in()
    while under_way:
        take_in()
    return sums


def _parts(examples: int, batch: int, world: World, members: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The batches of this process's workers: the worker here, and from which example to which."""
    for number, start in enumerate(range(0, examples, batch)):
        worker = members[number % len(members)]
        if worker in world.workers:
            yield worker - world.workers.start, start, min(start + batch, examples)
