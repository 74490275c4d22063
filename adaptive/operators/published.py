"""Looking at what another worker has published last, in the middle of a kernel and without waiting for it.

It is the one operator that may stand in a loop: nothing is sent at a point that others would have to come to. What it
needs to know of the worker and of the round it cannot read there, since sources are read outside of loops; so a driver
that calls it is traced with these numbers at hand (`Tracing.numbers`), over which the loop closes.

*Rounds*: a program step is one. What counts is what was published in the same round. So a replica from before the last
average is never mixed into those behind it, a worker that sits a round out is not looked at, and a run that goes on
from a checkpoint is the run that was interrupted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import Lock
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from adaptive.base.board import Board, Vectors
from adaptive.base.errors import CollectiveError
from adaptive.base.jaxprs import lower_to_callback, nested_equations
from adaptive.base.source_lines import at, current_line

from .context import tracing

SCHEDULES = ("random", "ring")


def peers(schedule: str, seed: int, round: int, update: int, worker: int, members: Sequence[int]) -> list[int]:
    """Whom a worker looks at in an update of a round: the first of these who has published anything.

    Args:
      schedule: "random": anyone, as drawn by a counter, so that the same numbers give the same worker again; "ring":
        one of its two neighbors among the members, in turn.
      update: 0, 1, … in the round.
    """
    others = [member for member in members if member > worker] + [member for member in members if member < worker]
    if schedule == "ring":
        neighbors = [others[0], others[-1]] if len(others) > 1 else others
        start = update % max(1, len(neighbors))
        return neighbors[start:] + neighbors[:start]
    counter = struct.pack("<4q", seed, round, update, worker)
    start = int.from_bytes(blake2b(counter, digest_size=8).digest(), "little") % max(1, len(others))
    return others[start:] + others[:start]


@dataclass
class Boards:
    """The boards of one program, one for each place of its driver that publishes. Made anew when members change."""

    boards: Sequence[Board] = ()
    members: Sequence[int] = ()
    _updates: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def update(self, place: int, worker: int, round: int) -> int:
        """How many updates the worker has made at this place in this round so far; counts this one."""
        with self._lock:
            of, count = self._updates.get((place, worker), (round, 0))
            count = count if of == round else 0
            self._updates[place, worker] = round, count + 1
        return count

    def restart(self, boards: Sequence[Board], members: Sequence[int]) -> None:
        """Go on with other boards, or members."""
        with self._lock:
            self.boards, self.members = boards, tuple(members)
            self._updates.clear()


@dataclass(eq=False)
class Pairing:
    """What one place of a driver does when it is passed. In Python, called by the kernels.

    Attributes:
      place: which of the program's boards is its own; known when the driver has been traced.
      nbytes: of the vectors that are published.
      line: of the driver.
    """

    boards: Boards
    schedule: str
    nbytes: tuple[int, ...]
    line: str
    place: int = -1

    def __call__(self, numbers: np.ndarray, *vectors: np.ndarray) -> Vectors:
        """Publish; what another worker has published last, or the same vectors."""
        worker, round, seed = map(int, numbers)
        boards, place = self.boards, self.place
        board, members = boards.boards[place], boards.members
        board.publish(worker, round, vectors)
        update = boards.update(place, worker, round)
        found = (board.look(peer, worker, round) for peer in peers(self.schedule, seed, round, update, worker, members))
        theirs = next((vectors for vectors in found if vectors is not None), vectors)
        return [other.view(own.dtype) for other, own in zip(theirs, vectors, strict=True)]

    def __repr__(self) -> str:  # equal for two traces of one driver
        return f"{self.schedule} pairs of {self.nbytes} bytes"


def of_another(vectors: Sequence[jax.Array], schedule: str, name: str) -> list[jax.Array]:
    """Publish this worker's vectors, and get those that another worker has published last in this round; the same
    vectors where nobody has. Waits for nobody.

    Args:
      vectors: one-dimensional. Local.
      schedule: who the other one is; see `peers`.
      name: of the operator, for errors.

    Returns:
      As many, of the same shapes and dtypes. Local.

    Raises:
      CollectiveError: outside a program.
    """
    trace = tracing()
    if trace is None:
        raise CollectiveError(
            f"{name} outside a program{at(current_line())}: there are no rounds, and nowhere to publish. Call it in "
            "the driver of an ad.Program."
        )
    if not trace.numbers:
        trace.wants_numbers.append(name)  # then the driver is traced again, with them
        return list(vectors)
    nbytes = tuple(v.size * v.dtype.itemsize for v in vectors)
    pairing = Pairing(trace.boards, schedule, nbytes, f"{name}{at(current_line())}")
    return of_another_p.bind(trace.numbers[0], *map(jax.lax.stop_gradient, vectors), pairing=pairing)


of_another_p = Primitive("of_another")
of_another_p.multiple_results = True


@of_another_p.def_abstract_eval
def _abstract(numbers: Any, *vectors: Any, pairing: Pairing) -> list[Any]:
    return [jax.core.ShapedArray(v.shape, v.dtype) for v in vectors]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, pairing: Pairing) -> Any:
    results = of_another_p.bind(*primals, pairing=pairing)
    return results, [ad.Zero.from_primal_value(r) for r in results]


def _batch(operands: Any, dims: Any, *, pairing: Pairing) -> Any:
    raise CollectiveError(
        f"{pairing.line} stands in a function that is mapped by jax.vmap: each member of the batch would be averaged "
        "with any member of another worker's. Map what is in front of it and behind, and average the whole tree."
    )


def _lower(context: Any, *operands: Any, pairing: Pairing) -> Any:
    return lower_to_callback(context, pairing, operands)


ad.primitive_jvps[of_another_p] = _jvp
batching.primitive_batchers[of_another_p] = _batch
mlir.register_lowering(of_another_p, _lower)


def publishes(eqn: JaxprEqn) -> bool:
    """Whether an equation publishes anything, itself or in a loop."""
    return any(e.primitive is of_another_p for e in (eqn, *nested_equations(eqn)))


def numbered(pairings: Iterator[Pairing]) -> tuple[Pairing, ...]:
    """A driver's places, in their order, each with its number.

    Raises:
      CollectiveError: two equations are one place: then two trees would share a board.
    """
    found: list[Pairing] = []
    for pairing in pairings:
        if any(pairing is known for known in found):
            raise CollectiveError(
                f"{pairing.line} stands in a jax.jit that the driver calls more than once, and JAX keeps its trace: "
                "two trees would be published in one place. Call it outside of the jitted function."
            )
        pairing.place = len(found)
        found.append(pairing)
    return tuple(found)
