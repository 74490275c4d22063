"""`neighbor_mean`: the mean of each worker's value with those of a few neighbors, by a fixed schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from adaptive.base.reductions import Mixed
from adaptive.operators.collectives import Collective

from ._leaves import combine, known_capacity, leaves_of
from ._reduce import gate, problem_of_mean
from ._schedules import Schedule, schedule_of

T = TypeVar("T")


def neighbor_mean(tree: T, schedule: Schedule = "random", *, when: ArrayLike | None = None) -> T:
    """Average values with those of one or a few other workers.

    Called in every step, this makes the replicas of a model converge to their mean, though a worker communicates with
    only one or two others per step (Lian et al. 2018, "Asynchronous Decentralized Parallel SGD"; KungFu's pair
    averaging). All schedules are doubly stochastic, so the mean over all workers does not change. Workers have equal
    weights, however many examples they have; a worker without examples is excluded.

    Sends the leaves' bytes once per neighbor (an `all_reduce` sends them twice), under MPI only to the neighbors. A
    replicated value is not sent.

    Args:
      tree: a pytree of floats and complex numbers, such as a worker's replica of a model. Local. If it depends on the
        microbatch, the local batch runs as a single one.
      schedule: which workers average in which step:
        "random": random pairs, drawn again in each step. With an odd number of workers one keeps its value.
        "ring": with the previous and the next worker, each with weight 1/3.
        "exponential": with the worker at distance 1, 2, 4, …, by turns (Ying et al. 2021).
        Or pairs of your own, a list per step, repeated: `[[(0, 1), (2, 3)], [(0, 2), (1, 3)]]`. A worker that is in no
        pair, or whose partner is absent, keeps its value.
      when: see `all_reduce`.

    Returns:
      `tree` with each leaf averaged, of its shape and dtype. Local.

    Raises:
      CollectiveError: a leaf cannot be averaged, `schedule` is not a known name, or its pairs are not a matching.

    Example:
      >>> import collectives as comm
      >>> print(comm.neighbor_mean(2.5, "ring"))  # outside a program: one worker
      2.5
    """
    how = NeighborMean(schedule_of("neighbor_mean", schedule, known_capacity()))
    leaves = leaves_of("neighbor_mean", tree, problem_of_mean)
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    rows = {name: leaf.reshape(-1) for name, leaf in leaves.items()}
    results = combine(how, rows, rows, when=gate("neighbor_mean", when))
    return jax.tree.unflatten(jax.tree.structure(tree), [jnp.reshape(results[name], shapes[name]) for name in leaves])


@dataclass(frozen=True)
class NeighborMean(Collective):
    """Collective that averages each worker's value with its neighbors', by a schedule."""

    schedule: Mixed

    name = "neighbor_mean"
    label = "neighbors"
    result_is_replicated = False
    shows_workers = True

    @property
    def op(self) -> Mixed:
        return self.schedule

    # A worker appends a 1 to its value. A worker without examples sends zeros, which excludes it from the means.

    def sent_shape(self, shape: tuple[int, ...], capacity: int) -> tuple[int, ...]:
        return (shape[0] + 1,)

    def encode(self, x: jax.Array, worker: Any, capacity: int) -> jax.Array:
        return jnp.concatenate([x, jnp.ones(1, x.dtype)])

    def encode_nothing(self, shape: tuple[int, ...], dtype: Any, worker: int, capacity: int) -> jax.Array:
        return jnp.zeros(self.sent_shape(shape, capacity), dtype)

    def decode(self, x: jax.Array, worker: Any, capacity: int) -> jax.Array:
        return x[:-1] / x[-1]

    def of_replicated(self, x: jax.Array, taking_part: jax.Array) -> jax.Array:
        return x

    @property
    def about(self) -> str:
        return f"neighbor_mean({self.schedule})"
