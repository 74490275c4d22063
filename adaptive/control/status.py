"""What processes say of themselves in every step, and what comes of it.

The last message of a step ends with a few elements that are the runtime's: the *status*. Each process writes what it
says of itself, all of it is summed over the processes like the rest of the message, and each reads what all have said.
So a decision that differs, and the readiness of new sizes, need no message of their own. How the elements lie is known
to this file alone:

    digest     one per worker   its process's decisions so far (`decision_digest.py`); zero from other processes
    wish       one per worker   whether its process wants to leave: 0, 1, or 2 if it is time (`membership.py`)
    ready      one              how many processes can make the sizes that are pending
    able       one              how many processes can make any sizes, now and from now on
    call       one              the mean of what one more kernel call costs them, in examples
    newcomers  one              how many workers that were called in are ready to join
    asks       one              how many processes say that it is time for a checkpoint
    seconds    three a worker   of input, of computing, and busy: `WorkerSeconds`

All but the seconds, the *facts*, is the same in nearly all steps. A process that hears the same facts again has nothing
to take up, and one that knows that its own have not changed (`repeats`) writes its seconds alone.

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

_OF_EACH = 2  # facts: digest, wish
_OF_ALL = 5  # facts: ready, able, call, newcomers, asks
_SECONDS = len(WorkerSeconds._fields)  # of each


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
      heard: what the last message has brought; shape=(length,), a new one each time. Replicated.
      repeats: whether this process's facts are those that it has said last. Local.
    """

    def __init__(self, world: World, digest: DecisionDigest, sizes: Readiness, members: Members):
        self._n = world.capacity
        self._n_facts, self.length = _n_facts(self._n), status_length(self._n)
        self._first_second = self._n_facts  # where this process's first worker tells its first
        self._world, self._digest, self._sizes, self._members = world, digest, sizes, members
        self.asks = self.asked = self.repeats = False
        self.told: tuple[float, Sequence[float], Sequence[float]] = 0.0, (), ()
        self._own, self._own_seconds = np.zeros(0), np.zeros((_SECONDS, 0))  # what was said last, and a view of it
        self.heard, self._facts, self._any_asked = np.zeros(self.length), b"", False  # with the last message

    def encode(self) -> np.ndarray:
        """Return this process's part of the sum; shape=(length,), valid until the next call."""
        if not self.repeats:
            self._say_facts()
        if self.told[1]:
            self._own_seconds[0], self._own_seconds[1], self._own_seconds[2] = self.told
        return self._own

    def encode_one(self, input_: float, computing: float, busy: float) -> np.ndarray:
        """Return what `encode` does, with the seconds of this process's only worker."""
        if not self.repeats:
            self._say_facts()
        own, n, first = self._own, self._n, self._first_second
        own[first], own[first + n], own[first + 2 * n] = input_, computing, busy
        return own

    def _say_facts(self) -> None:
        workers, sizes, n = self._world.workers, self._sizes, self._n
        self._own = np.zeros(self.length)
        self._first_second = self._n_facts + workers.start
        self._own_seconds = self._own[self._n_facts :].reshape(_SECONDS, n)[:, workers.start : workers.stop]
        of_each = self._own[: _OF_EACH * n].reshape(_OF_EACH, n)[:, workers.start : workers.stop]
        of_each[0], of_each[1] = self._digest.value, self._members.wish
        call, newcomers = sizes.call / self._world.processes, self._members.newcomers
        self._own[_OF_EACH * n : self._n_facts] = sizes.ready, sizes.able, call, newcomers, self.asks

    def decode(self, elements: np.ndarray) -> None:
        """Take what all processes have said; shape=(length,). It is kept until the next message.

        Raises:
          DisagreementError: some process has decided otherwise. On every process.
        """
        facts = elements[: self._n_facts].tobytes()
        if not (self.repeats and facts == self._facts):
            self._take_up(elements)
        self._facts, self.heard, self.asked = facts, elements, self._any_asked

    def _take_up(self, elements: np.ndarray) -> None:
        elements = elements[: self._n_facts].copy()
        for seat in self._world.unowned_slots:  # nobody is there to decide otherwise
            elements[seat] = self._digest.value
        verdict = _verdict(elements, self._n, self._world.processes)
        self._digest.compare(verdict.digests, own=self._world.workers)
        self._sizes.agreed(ready=verdict.ready, able=verdict.able, call=verdict.call)
        self._members.agreed(newcomers=verdict.newcomers, wishes=verdict.wishes)
        self._any_asked = verdict.asked

    def inputs(self, heard: Sequence[np.ndarray]) -> np.ndarray:
        """Return `seconds.input`, summed over messages; shape=(workers,). Replicated.

        Args:
          heard: of each message, `heard` as it was then.
        """
        return np.sum(heard, axis=0)[self._n_facts : self._n_facts + self._n]

    @property
    def seconds(self) -> WorkerSeconds:
        """Of all workers, by the last message. Replicated."""
        return WorkerSeconds(*self.heard[self._n_facts :].astype(np.float32).reshape(_SECONDS, self._n))


def _n_facts(workers: int) -> int:
    return _OF_EACH * workers + _OF_ALL


def status_length(workers: int) -> int:
    """How many elements a status has."""
    return _n_facts(workers) + _SECONDS * workers


def _verdict(facts: np.ndarray, workers: int, processes: int) -> Verdict:
    digests, wishes = facts[:-_OF_ALL].reshape(_OF_EACH, workers)
    ready, able, call, newcomers, asks = facts[-_OF_ALL:].tolist()
    return Verdict(digests, wishes, ready == processes, able == processes, call, round(newcomers), asks > 0)
