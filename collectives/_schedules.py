"""Who averages with whom, in which step: schedules that all workers know."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adaptive.extend import Mixed, whole

from ._leaves import error

Weights = Mapping[int, Mapping[int, float]]
Schedule = str | Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class RandomMatchings(Mixed):
    """Pairs that are drawn anew in each step. Of an odd number of workers one keeps its own."""

    seed: int = 0

    def weights(self, step: int, members: Sequence[int]) -> Weights:
        order = np.random.Generator(np.random.Philox(key=[self.seed, step])).permutation(list(members)).tolist()
        return _of_pairs(zip(order[::2], order[1::2], strict=False))


@dataclass(frozen=True)
class Ring(Mixed):
    """Each with the one before it and the one behind it, all three alike."""

    def weights(self, step: int, members: Sequence[int]) -> Weights:
        n = len(members)
        if n < 3:
            return _of_pairs([(members[0], members[1])]) if n == 2 else {}
        return {own: dict.fromkeys((members[i - 1], own, members[(i + 1) % n]), 1 / 3) for i, own in enumerate(members)}


@dataclass(frozen=True)
class Exponential(Mixed):
    """Each with the one that is 1, 2, 4, … places behind it: another distance in each step. What one gives it does not
    get back, so this is no matching; with a power of two of workers all are averaged when each distance had its turn.
    """

    def weights(self, step: int, members: Sequence[int]) -> Weights:
        n = len(members)
        if n == 1:
            return {}
        distance = 2 ** (max(step - 1, 0) % math.ceil(math.log2(n)))
        return {own: {own: 0.5, members[(i + distance) % n]: 0.5} for i, own in enumerate(members)}


@dataclass(frozen=True)
class Matchings(Mixed):
    """Pairs as they were given, those of one step after those of another, over and over."""

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
    """A schedule as its name or its pairs say.

    Args:
      what: the operator, for errors.
      workers: how many there can be, where that is known.

    Raises:
      CollectiveError: there is none of this name; or the pairs are none, name a worker twice in one step, or one that
        there cannot be.
    """
    if isinstance(schedule, str):
        if schedule not in NAMED:
            names = ", ".join(map(repr, NAMED))
            raise error(what, f"schedule={schedule!r} is none of {names}. Pairs of your own:\n{_EXAMPLE}")
        return NAMED[schedule]
    try:
        turns = tuple(tuple(tuple(map(whole, pair)) for pair in turn) for turn in schedule)
    except TypeError:
        raise error(
            what, f"schedule={schedule!r} is neither a name nor pairs of workers by step:\n{_EXAMPLE}"
        ) from None
    if not turns:
        raise error(what, f"schedule={schedule!r} has no step in it. One or more, which are repeated:\n{_EXAMPLE}")
    for number, turn in enumerate(turns):
        _check_turn(what, number, turn, workers)
    return Matchings(turns)  # type: ignore[arg-type]


def _check_turn(what: str, number: int, turn: Sequence[tuple[int | None, ...]], workers: int | None) -> None:
    seen: set[int] = set()
    for pair in turn:
        if len(pair) != 2 or None in pair:
            raise error(what, f"schedule[{number}] has {pair} in it, which is no pair of workers:\n{_EXAMPLE}")
        for worker in pair:
            assert worker is not None
            if worker in seen:
                raise error(
                    what,
                    f"schedule[{number}] is no matching: worker {worker} is in it twice, and can be averaged with one "
                    f"other in a step:\n{_EXAMPLE}",
                )
            if worker < 0 or (workers is not None and worker >= workers):
                there = "workers are numbered from 0" if workers is None else f"the workers are 0 to {workers - 1}"
                raise error(what, f"schedule[{number}] has worker {worker} in it: {there}.")
            seen.add(worker)


_EXAMPLE = "    schedule=[[(0, 1), (2, 3)], [(0, 2), (1, 3)]]      the first step's pairs, the second's, and again"
