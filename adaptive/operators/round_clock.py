"""Ending a worker's local steps when enough others have finished theirs, inside a kernel and without waiting.

Each worker publishes how long its local steps of this round take, measured or projected, on its own clock. When as many
workers as the quorum have finished by these durations, those that are late take no further step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.mailbox import Vectors
from adaptive.base.process.source_lines import at, current_line

from .context import tracing
from .peer_read import Pairing, read_peer_p

_PUBLISHED = np.dtype(np.float32)


@dataclass
class _OwnRound:
    """A worker's own round: when it began, and after how many seconds it finished, if it has."""

    round: int
    began: float
    finished: float | None = None


@dataclass(eq=False)
class RoundClock(Pairing):
    """The Python callback of one call of `takes_another_step`, which kernels call before each local step.

    Attributes:
      grace: for how long a round stays open after the quorum, relative to the time until then.
    """

    grace: float = 0.0
    _rounds: dict[int, _OwnRound] = field(default_factory=dict)

    def __call__(self, numbers: np.ndarray, *vectors: np.ndarray) -> Vectors:
        """Publish this worker's seconds, and return (1 to take another step or 0, …); shape=(3,), float32."""
        worker, round, _ = map(int, numbers)
        missing, taken, quorum = map(int, vectors[0])
        return [np.array([self._goes_on(worker, round, missing, taken, quorum), 0, 0], _PUBLISHED)]

    def _goes_on(self, worker: int, round: int, missing: int, taken: int, quorum: int) -> bool:
        now = time.monotonic()
        if not taken:
            self._rounds[worker] = _OwnRound(round, now)
            return True
        own = self._rounds[worker]
        elapsed = now - own.began
        each = elapsed / taken
        if missing <= 0 and own.finished is None:
            own.finished = elapsed
        seconds = elapsed + missing * each if own.finished is None else own.finished
        mailbox = self.mailboxes.mailboxes[self.place]
        mailbox.publish(worker, round, [np.array([seconds, 0, 0], _PUBLISHED).view(np.uint8)])
        until = _until_quorum([seconds, *self._of_others(worker, round)], quorum)
        return elapsed + each <= until * (1 if missing <= 0 else 1 + self.grace)

    def _of_others(self, worker: int, round: int) -> Iterator[float]:
        mailbox = self.mailboxes.mailboxes[self.place]
        for other in self.mailboxes.members:
            found = None if other == worker else mailbox.look(other, worker, round)
            if found is not None:
                yield float(found[0].view(_PUBLISHED)[0])

    def __repr__(self) -> str:  # equal in all traces of a driver
        return f"a round's clock with {self.grace} of grace"


def _until_quorum(seconds: list[float], quorum: int) -> float:
    """Return after how many seconds as many workers have finished; infinity if so many have not published."""
    return sorted(seconds)[quorum - 1] if len(seconds) >= quorum else float("inf")


def takes_another_step(missing: Any, taken: Any, quorum: Any, grace: float, name: str) -> jax.Array:
    """Return whether this worker takes another local step in this round. Does not wait.

    It does before its first step, and afterwards if the step is expected to end before as many workers as the quorum
    have finished and, if it has not finished itself, a grace period has passed. Call it in the condition of a loop.

    Args:
      missing: local steps that this worker needs to finish; 0 or less once it has. Local.
      taken: local steps that it has taken in this round. Local.
      quorum: number of workers, of those that take part in the round. Replicated.
      grace: for how long the round stays open after the quorum, relative to the time until then.
      name: of the operator, for errors.

    Returns:
      A boolean scalar. Local. Always true outside a program.
    """
    trace = tracing()
    if trace is None:
        return jnp.asarray(True)
    published = jnp.stack([jnp.asarray(x, _PUBLISHED) for x in (missing, taken, quorum)])
    clock = RoundClock(trace.mailboxes, "quorum", (published.nbytes,), f"{name}{at(current_line())}", grace=grace)
    (found,) = read_peer_p.bind(trace.numbers, published, pairing=clock)
    return found[0] > 0
