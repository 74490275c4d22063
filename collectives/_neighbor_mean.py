"""`neighbor_mean`: each worker's value averaged with some others', by a schedule that all know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from adaptive.extend import Collective, Mixed

from ._leaves import combine, known_capacity, leaves_of
from ._reduce import gate, problem_of_mean
from ._schedules import Schedule, schedule_of

T = TypeVar("T")


def neighbor_mean(tree: T, schedule: Schedule = "random", *, when: ArrayLike | None = None) -> T:
    """Average values with those of some other workers: of one other, for a start.

    By this replicas of a model come to agree, and each speaks to one or two others in a step, and not to all (Lian et
    al. 2018, "Asynchronous Decentralized Parallel SGD"; KungFu's pair averaging). All schedules are doubly
    stochastic: the mean over all workers stays what it is. Workers count alike, however many examples they have; one
    that has none is in no mean.

    Costs the leaves' bytes once or twice, where an `all_reduce` costs them twice; under MPI they go to whom they are
    for and to nobody else. A value that is replicated costs nothing.

    Args:
      tree: a pytree of floats and complex numbers, such as a model that is each worker's own. Local: the same in all
        kernel calls of a worker; of values that each has of its own, the batch runs as one call.
      schedule: who averages with whom:
        "random": pairs, drawn anew in each step. Of an odd number of workers one keeps its own.
        "ring": the one before and the one behind, each by a third.
        "exponential": the one that is 1, 2, 4, … places behind, in turns (Ying et al. 2021).
        Or pairs of your own, a list for each step, which are repeated: `[[(0, 1), (2, 3)], [(0, 2), (1, 3)]]`. Who is
        in no pair, or has lost its other, keeps its own.
      when: see `all_reduce`.

    Returns:
      `tree` with each leaf averaged, of its shape and dtype. Local.

    Raises:
      CollectiveError: for leaves of which there is no mean, for names that are no schedule, and pairs that are no
        matching.

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
    """A weighted mean of some workers' values."""

    schedule: Mixed

    name = "neighbor_mean"
    label = "neighbors"
    result_is_replicated = False
    shows_workers = True

    @property
    def op(self) -> Mixed:
        return self.schedule

    # Behind its value a worker sends a 1, and nothing but zeros if it has no examples, so that it is in no mean.

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
