"""Reading another worker's latest published vectors inside a kernel, without waiting for it.

It is not a collective, so it may be in a loop, which closes over the numbers that it needs (`DriverTrace.numbers`).
A program step is one *round*. Only vectors of the same round are read, so replicas from before the last average are
never mixed with later ones, and a restored run equals the uninterrupted one.
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
from jax.interpreters import ad, batching, mlir

from adaptive.base.errors import CollectiveError
from adaptive.base.mailbox import Mailbox, Vectors
from adaptive.base.process.source_lines import at, current_line
from adaptive.base.values.jaxprs import JaxprEqn, Primitive, lower_to_callback, nested_equations

from .context import tracing

SCHEDULES = ("random", "ring")


def peers(schedule: str, seed: int, round: int, update: int, worker: int, members: Sequence[int]) -> list[int]:
    """Return the workers that a worker tries to read in an update, in order. It uses the first with published vectors.

    Args:
      schedule: "random": any member, drawn by a counter-based generator, so equal arguments give equal results;
        "ring": the two neighbors among the members, in turn.
      update: number of the update in the round, from 0.
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
class PeerMailboxes:
    """The mailboxes of one program, one for each call of `read_peer`. Recreated when members change."""

    mailboxes: Sequence[Mailbox] = ()
    members: Sequence[int] = ()
    _updates: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def update(self, place: int, worker: int, round: int) -> int:
        """Count an update of a worker by one `read_peer`. Returns the number of earlier ones in this round."""
        with self._lock:
            of, count = self._updates.get((place, worker), (round, 0))
            count = count if of == round else 0
            self._updates[place, worker] = round, count + 1
        return count

    def restart(self, mailboxes: Sequence[Mailbox], members: Sequence[int]) -> None:
        """Replace the mailboxes and members."""
        with self._lock:
            self.mailboxes, self.members = mailboxes, tuple(members)
            self._updates.clear()


@dataclass(eq=False)
class Pairing:
    """The Python callback of one call of `read_peer`, which kernels call.

    Attributes:
      place: number of its mailbox; set after the driver is traced.
      nbytes: size of each published vector.
      line: name of the operator with the driver's line.
    """

    mailboxes: PeerMailboxes
    schedule: str
    nbytes: tuple[int, ...]
    line: str
    place: int = -1

    def __call__(self, numbers: np.ndarray, *vectors: np.ndarray) -> Vectors:
        """Publish vectors, and return another worker's latest, or the same vectors if there are none."""
        worker, round, seed = map(int, numbers)
        mailboxes, place = self.mailboxes, self.place
        mailbox, members = mailboxes.mailboxes[place], mailboxes.members
        mailbox.publish(worker, round, vectors)
        update = mailboxes.update(place, worker, round)
        found = (
            mailbox.look(peer, worker, round) for peer in peers(self.schedule, seed, round, update, worker, members)
        )
        theirs = next((vectors for vectors in found if vectors is not None), vectors)
        return [other.view(own.dtype) for other, own in zip(theirs, vectors, strict=True)]

    def __repr__(self) -> str:  # equal in all traces of a driver
        return f"{self.schedule} pairs of {self.nbytes} bytes"


def read_peer(vectors: Sequence[jax.Array], schedule: str, name: str) -> list[jax.Array]:
    """Publish this worker's vectors, and return another worker's latest of this round, or the same vectors if there are
    none. Does not wait.

    Args:
      vectors: one-dimensional. Local.
      schedule: selects the other worker; see `peers`.
      name: of the operator, for errors.

    Returns:
      Vectors of the same shapes and dtypes. Local.

    Raises:
      CollectiveError: outside a program.
    """
    trace = tracing()
    if trace is None:
        raise CollectiveError(
            f"{name} outside a program{at(current_line())}: only a program has rounds and mailboxes. Call it in "
            "the driver of an ad.Program."
        )
    nbytes = tuple(v.size * v.dtype.itemsize for v in vectors)
    pairing = Pairing(trace.mailboxes, schedule, nbytes, f"{name}{at(current_line())}")
    return read_peer_p.bind(trace.numbers, *map(jax.lax.stop_gradient, vectors), pairing=pairing)


read_peer_p = Primitive("read_peer")
read_peer_p.multiple_results = True
read_peer_p.def_abstract_eval(lambda numbers, *vectors, pairing: list(vectors))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, pairing: Pairing) -> Any:
    results = read_peer_p.bind(*primals, pairing=pairing)
    return results, [ad.Zero.from_primal_value(r) for r in results]


def _batch(operands: Any, dims: Any, *, pairing: Pairing) -> Any:
    raise CollectiveError(
        f"{pairing.line} is in a function that is mapped by jax.vmap: each mapped element would be averaged with an "
        "arbitrary element of another worker. Map the code before and after it, and average the whole tree."
    )


ad.primitive_jvps[read_peer_p] = _jvp
batching.primitive_batchers[read_peer_p] = _batch
mlir.register_lowering(read_peer_p, lambda ctx, *values, pairing: lower_to_callback(ctx, pairing, values))


def publishes(eqn: JaxprEqn) -> bool:
    """Return whether an equation publishes vectors, itself or in a nested jaxpr."""
    return any(e.primitive is read_peer_p for e in (eqn, *nested_equations(eqn)))


def numbered(pairings: Iterator[Pairing]) -> tuple[Pairing, ...]:
    """Assign mailbox numbers to a driver's pairings, in order.

    Raises:
      CollectiveError: two equations share one pairing, and so would share a mailbox.
    """
    found: list[Pairing] = []
    for pairing in pairings:
        if any(pairing is known for known in found):
            raise CollectiveError(
                f"{pairing.line} is in a jax.jit that the driver calls more than once. JAX reuses its trace, so two "
                "trees would share a mailbox. Call it outside of the jitted function."
            )
        pairing.place = len(found)
        found.append(pairing)
    return tuple(found)
