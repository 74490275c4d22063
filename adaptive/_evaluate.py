"""Exact means over a data set, over all workers: no example twice, none left out, whatever the last batch's size."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from ._data import Rows
from ._errors import DriverError
from ._trace import leaf_names
from ._world import World

_AHEAD = 2  # batches per worker that are under way at once: one computes while the next is fetched


def evaluate(fn: Callable, states: Sequence[Any], data: Rows, world: World, batch: int, about: str = "") -> Any:
    """Means of `fn(state, batch)` over `data`, weighted by examples.

    Args:
      states: the user's state on the device of each worker of this process.
      batch: examples in one call; the last one may be smaller.
      about: which evaluation this is, in words.

    Returns:
      A pytree of numpy arrays. Replicated, to the last bit.
    """
    shapes = _shapes(fn, states[0], data, batch)
    mine = _sums(fn, shapes, states, data, world, batch)
    everyone = [pickle.loads(other) for other in world.share(pickle.dumps(mine), about)]
    means = [sum(sums) / len(data) for sums in zip(*everyone, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(shapes), means)


def _shapes(fn: Callable, state: Any, data: Rows, batch: int) -> Any:
    """What `fn` returns, for batches of any size: found on all processes alike, whichever batches they get."""
    full = min(batch, len(data))
    last = len(data) % full
    shapes = others = jax.eval_shape(fn, state, data.shapes(full))
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
    return shapes


def _sums(fn: Callable, shapes: Any, states: Sequence[Any], data: Rows, world: World, batch: int) -> list[np.ndarray]:
    """This process's part of the sums over all examples, in double precision; a list over leaves."""
    call = jax.jit(fn)
    sums = [np.zeros(leaf.shape) for leaf in jax.tree.leaves(shapes)]
    under_way: deque[tuple[int, list[jax.Array]]] = deque()

    def take_in() -> None:
        count, means = under_way.popleft()
        for total, mean in zip(sums, means, strict=True):
            total += count * np.asarray(mean, np.float64)

    for local, start, stop in _parts(len(data), batch, world):
        rows = jax.device_put(data.rows(np.arange(start, stop)), world.devices[local])
        under_way.append((stop - start, jax.tree.leaves(call(states[local], rows))))
        if len(under_way) > _AHEAD * len(states):
            take_in()
    while under_way:
        take_in()
    return sums


def _parts(examples: int, batch: int, world: World) -> Iterator[tuple[int, int, int]]:
    """The batches of this process's workers: the worker here, and from which example to which."""
    for number, start in enumerate(range(0, examples, batch)):
        worker = number % world.size
        if worker in world.workers:
            yield worker - world.workers.start, start, min(start + batch, examples)
