"""Schedules of neighbor means: which workers average in which step. All workers compute the same schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adaptive.base.numbers import whole
from adaptive.base.reductions import Mixed

from ._leaves import error

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
class Exponential(Mixed):
    """Each worker with the one at distance 1, 2, 4, …: one distance per step, by turns.

    This is not a matching: a worker sends to one worker and receives from another. If the number of workers is a power
    of two, one pass over all distances averages all workers.
    """

    def weights(self, step: int, members: Sequence[int]) -> Weights:
        n = len(members)
        if n == 1:
            return {}
        distance = 2 ** (max(step - 1, 0) % math.ceil(math.log2(n)))
        return {own: {own: 0.5, members[(i + distance) % n]: 0.5} for i, own in enumerate(members)}


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


NAMED: dict[str, Mixed] = {"random": RandomMatchings(), "ring": Ring(), "exponential": Exponential()}


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
    if isinstance(schedule, str):
        if schedule not in NAMED:
            names = ", ".join(map(repr, NAMED))
            raise error(
                what, f"schedule= must be one of {names}, or your own pairs; got {schedule!r}. For example:\n{_EXAMPLE}"
            )
        return NAMED[schedule]
    try:
        turns = tuple(tuple(tuple(map(whole, pair)) for pair in turn) for turn in schedule)
    except TypeError:
        raise error(
            what, f"schedule={schedule!r} is neither a name nor a list of pairs per step:\n{_EXAMPLE}"
        ) from None
    if not turns:
        raise error(
            what,
            f"schedule={schedule!r} is empty. Pass the pairs of at least one step:\n{_EXAMPLE}",
        )
    for number, turn in enumerate(turns):
        _check_turn(what, number, turn, workers)
    return Matchings(turns)  # type: ignore[arg-type]


def _check_turn(what: str, number: int, turn: Sequence[tuple[int | None, ...]], workers: int | None) -> None:
    seen: set[int] = set()
    for pair in turn:
        if len(pair) != 2 or None in pair:
            raise error(what, f"schedule[{number}] contains {pair}, which is not a pair of workers:\n{_EXAMPLE}")
        for worker in pair:
            assert worker is not None
            if worker in seen:
                raise error(
                    what,
                    f"schedule[{number}] is not a matching: it names worker {worker} twice, but a worker can be "
                    f"averaged with only one other per step:\n{_EXAMPLE}",
                )
            if worker < 0 or (workers is not None and worker >= workers):
                there = "workers are numbered from 0" if workers is None else f"the workers are 0 to {workers - 1}"
                raise error(what, f"schedule[{number}] names worker {worker}: {there}.")
            seen.add(worker)


_EXAMPLE = "    schedule=[[(0, 1), (2, 3)], [(0, 2), (1, 3)]]      the first step's pairs, the second's, and again"
