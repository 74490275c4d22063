"""What processes say of themselves in every step, and what comes of it.

The last message of a step ends with a few elements that are the runtime's: the *status*. Each process writes what it
says of itself, all of it is summed over the processes like the rest of the message, and each reads what all have said.
So a decision that differs, and the readiness of new sizes, need no message of their own. How the elements lie is known
to this file alone:

    digest     one per worker   its process's decisions so far (`decision_digest.py`); zero from other processes
    wish       one per worker   whether its process wants to leave: 0, 1, or 2 if it is time (`membership.py`)
    seconds    three a worker   of input, of computing, and busy: `WorkerSeconds`
    ready      one              how many processes can make the sizes that are pending
    able       one              how many processes can make any sizes, now and from now on
    call       one              the mean of what one more kernel call costs them, in examples
    newcomers  one              how many workers that were called in are ready to join
    asks       one              how many processes say that it is time for a checkpoint

What is asked of all alike is counted, as `ready` is, or averaged, as `call` is; what is asked of each has a place for
every worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from adaptive.base.activity import WorkerSeconds
from adaptive.base.world import World

from .decision_digest import DecisionDigest

_OF_EACH = 2 + len(WorkerSeconds._fields)  # digest, wish, seconds
_OF_ALL = 5  # ready, able, call, newcomers, asks


class Readiness(Protocol):
    """Batch sizes, as far as a status tells of them."""

    @property
    def ready(self) -> bool:
        """Whether this process can make the sizes that are pending. Local."""
        ...

    @property
    def able(self) -> bool:
        """Whether this process can make any sizes, now and from now on. Local."""
        ...

    @property
    def call(self) -> float:
        """What one more kernel call costs this process, in examples. Local."""
        ...

    def agreed(self, *, ready: bool, able: bool, call: float) -> None:
        """Take what all processes are, and what a call costs them on average. Replicated."""
        ...


class Members(Protocol):
    """Who is there, as far as a status tells of it."""

    @property
    def newcomers(self) -> int:
        """How many workers that were called in are ready, as far as this process knows. Local."""
        ...

    @property
    def wish(self) -> int:
        """Whether this process wants to leave: 0, 1, or 2 if it is time. Local."""
        ...

    def agreed(self, *, newcomers: int, wishes: np.ndarray) -> None:
        """Take how many are ready, and each worker's wish. Replicated."""
        ...


class Verdict(NamedTuple):
    """What all processes have said with one message. Replicated."""

    digests: np.ndarray  # shape=(workers,)
    wishes: np.ndarray  # shape=(workers,)
    seconds: WorkerSeconds
    ready: bool  # of all processes
    able: bool
    call: float  # on average
    newcomers: int  # of all processes together
    asked: bool  # of any process


class Status:
    """What this process says with each step, and what it hears.

    Args:
      digest: of the decisions that this process has taken.
      sizes: whose readiness is told.
      members: who come and go.

    Attributes:
      length: elements of a message.
      asks: whether this process says that it is time for a checkpoint. Local.
      asked: whether any has said so with the last message. Replicated.
      told: what to tell of this process's seconds: what `Activity.of_workers` has returned. Local.
      seconds: of all workers, by the last message. Replicated.
    """

    def __init__(self, world: World, digest: DecisionDigest, sizes: Readiness, members: Members):
        self.length = status_length(world.capacity)
        self._world, self._digest, self._sizes, self._members = world, digest, sizes, members
        self.asks = self.asked = False
        self.told: tuple[float, Sequence[float], Sequence[float]] = 0.0, (), ()
        self.seconds = WorkerSeconds(*np.zeros((3, world.capacity)))

    def encode(self) -> np.ndarray:
        """This process's part of the sum; shape=(length,)."""
        own, sizes, n = self._world.workers, self._sizes, self._world.capacity
        elements = np.zeros(self.length)
        each = elements[:-_OF_ALL].reshape(_OF_EACH, n)[:, own.start : own.stop]
        each[0], each[1] = self._digest.value, self._members.wish
        if self.told[1]:
            each[2], each[3], each[4] = self.told
        call, newcomers = sizes.call / self._world.processes, self._members.newcomers
        elements[-_OF_ALL:] = sizes.ready, sizes.able, call, newcomers, self.asks
        return elements

    def decode(self, elements: np.ndarray) -> None:
        """Take what all processes have said; shape=(length,).

        Raises:
          DisagreementError: some process has decided otherwise. On every process.
        """
        for seat in self._world.unattended:  # nobody is there to decide otherwise
            elements[seat] = self._digest.value
        verdict = _verdict(elements, self._world.processes)
        self._digest.compare(verdict.digests, own=self._world.workers)
        self._sizes.agreed(ready=verdict.ready, able=verdict.able, call=verdict.call)
        self._members.agreed(newcomers=verdict.newcomers, wishes=verdict.wishes)
        self.asked, self.seconds = verdict.asked, verdict.seconds


def status_length(workers: int) -> int:
    """How many elements a status has."""
    return _OF_EACH * workers + _OF_ALL


def _verdict(elements: np.ndarray, processes: int) -> Verdict:
    digests, wishes, *seconds = elements[:-_OF_ALL].reshape(_OF_EACH, -1)
    ready, able, call, newcomers, asks = elements[-_OF_ALL:].tolist()
    all_ready, all_able = ready == processes, able == processes
    heard = WorkerSeconds(*np.array(seconds, np.float32))
    return Verdict(digests, wishes.copy(), heard, all_ready, all_able, call, round(newcomers), asks > 0)
