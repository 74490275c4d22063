"""`neighbor_mean`: the mean of each worker's value with those of a few neighbors, by a fixed schedule.

All workers compute the same schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from adaptive.base.reductions import Mixed
from adaptive.base.values.numbers import whole
from adaptive.operators.collectives import Collective

from ._leaves import combine, error, known_capacity, leaves_of
from ._reduce import gate, problem_of

Weights = Mapping[int, Mapping[int, float]]
Schedule = str | Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class RandomMatchings(Mixed):
    """Random pairs, drawn again in each step. With an odd number of workers one keeps its value."""

    seed: int = 0

    def weights(self, step: int, members: Sequence[int]) -> Weights:
        order = np.random.Generator(np.random.Philox(key=[self.seed, step])).permutation(list(members)).tolist()
        return _of_pairs(zip(order[::2], order[1::2], strict=False))


@dataclass(frozen=True)
class Ring(Mixed):
    """Each worker with the previous and the next one, with equal weights."""

    def weights(self, step: int, members: Sequence[int]) -> Weights:
        n = len(members)
        if n < 3:
            return _of_pairs([(members[0], members[1])]) if n == 2 else {}
        return {own: dict.fromkeys((members[i - 1], own, members[(i + 1) % n]), 1 / 3) for i, own in enumerate(members)}


@dataclass(frozen=True)
class Matchings(Mixed):
    """Pairs given by the user: one list for each step, repeated."""

    turns: tuple[tuple[tuple[int, int], ...], ...]

    def weights(self, step: int, members: Sequence[int]) -> Weights:
        there = set(members)
        turn = self.turns[max(step - 1, 0) % len(self.turns)]
        return _of_pairs(pair for pair in turn if there.issuperset(pair))


def _of_pairs(pairs: Iterable[tuple[int, int]]) -> Weights:
    found: dict[int, dict[int, float]] = {}
    for a, b in pairs:
        found[a] = found[b] = {a: 0.5, b: 0.5}
    return found


NAMED: dict[str, Mixed] = {"random": RandomMatchings(), "ring": Ring()}


def schedule_of(what: str, schedule: Schedule, workers: int | None) -> Mixed:
    """Return a schedule by its name or its pairs.

    Args:
      what: name of the operator, for errors.
      schedule: a name, or lists of pairs.
      workers: capacity, or `None` if it is unknown.

    Raises:
      CollectiveError: the name is unknown; or a step's pairs are not pairs, name a worker twice, or name one that
        does not exist.
    """
    if isinstance(schedule, str) and schedule in NAMED:
        return NAMED[schedule]
    try:
        turns = tuple(tuple(tuple(map(whole, pair)) for pair in turn) for turn in schedule)
    except TypeError:
        turns = ()
    if turns and all(_is_matching(turn, workers) for turn in turns):
        return Matchings(turns)  # type: ignore[arg-type]
    there = "numbers of workers, from 0 on" if workers is None else f"numbers of workers, from 0 to {workers - 1}"
    raise error(
        what,
        f"schedule={schedule!r} must be one of {', '.join(map(repr, NAMED))}; or, for each step, pairs of {there}, in "
        "which no worker is named twice:\n"
        "    schedule=[[(0, 1), (2, 3)], [(0, 2), (1, 3)]]      the first step's pairs, the second's, and again",
    )


def _is_matching(turn: Sequence[tuple[int | None, ...]], workers: int | None) -> bool:
    named = [worker for pair in turn for worker in pair]
    exist = all(worker is not None and 0 <= worker < (workers or worker + 1) for worker in named)
    return exist and all(len(pair) == 2 for pair in turn) and len(set(named)) == len(named)


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
    leaves = leaves_of("neighbor_mean", tree, problem_of)
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

    def decode(self, x: jax.Array, worker: Any, capacity: int) -> jax.Array:
        return x[:-1] / x[-1]

    @property
    def about(self) -> str:
        return f"neighbor_mean({self.schedule})"
