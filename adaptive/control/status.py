"""What processes say of themselves in every step, and what comes of it.

The last message of a step ends with a few elements that are the runtime's: the *status*. Each process writes what it
says of itself, all of it is summed over the processes like the rest of the message, and each reads what all have said.
So a decision that differs, and the readiness of new sizes, need no message of their own. How the elements lie is known
to this file alone:

    digest   one per worker   its process's decisions so far (`decision_digest.py`); zero from other processes
    ready    one              how many processes can make the sizes that are pending
    able     one              how many processes can make any sizes, now and from now on
    call     one              the mean of what one more kernel call costs them, in examples

What is asked of all alike is counted, as `ready` is, or averaged, as `call` is; what is asked of each has a place for
every worker.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from adaptive.base.world import World

from .decision_digest import DecisionDigest

_OF_ALL = 3  # ready, able, call


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


class Verdict(NamedTuple):
    """What all processes have said with one message. Replicated."""

    digests: np.ndarray  # shape=(workers,)
    ready: bool  # of all processes
    able: bool
    call: float  # on average


class Status:
    """What this process says with each step, and what it hears.

    Args:
      digest: of the decisions that this process has taken.
      sizes: whose readiness is told.

    Attributes:
      length: elements of a message.
    """

    def __init__(self, world: World, digest: DecisionDigest, sizes: Readiness):
        self.length = status_length(world.size)
        self._world, self._digest, self._sizes = world, digest, sizes

    def encode(self) -> np.ndarray:
        """This process's part of the sum; shape=(length,)."""
        own = self._world.workers
        elements = np.zeros(self.length)
        elements[own.start : own.stop] = self._digest.value
        elements[-_OF_ALL:] = self._sizes.ready, self._sizes.able, self._sizes.call / self._world.processes
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


def status_length(workers: int) -> int:
    """How many elements a status has."""
    return workers + _OF_ALL


def _verdict(elements: np.ndarray, processes: int) -> Verdict:
    ready, able, call = elements[-_OF_ALL:].tolist()
    return Verdict(elements[:-_OF_ALL], ready == processes, able == processes, call)
