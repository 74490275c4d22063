"""A sum over hosts, of which one process each takes part, while these do other things.

Each sums one share of the elements: it is sent this share by all others, adds up, and sends the sum to them. So of h
hosts each sends 2 (h - 1) / h of the array; each element is summed at one place, in one order, so all have the same
bits; and it takes two steps however many hosts there are.

When processes are lost, Open MPI (5.0.11) dies of requests that are waited for together ("error after request freed"):
those that were not over it frees with the one that failed, and what still comes for them is an error that nobody can
handle. So what is received is waited for one by one; what is sent, only when it is known to have arrived; and what is
under way when a process is lost is waited for by nobody, and its memory kept (`by_hosts.py`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

_TO_ADD, _ADDED = 7105, 7106


class InterHostSum:
    """One such sum: `begin`, then `add`, then `finish`. Of several under way all processes take the same steps in the
    same order. What these raise is MPI's.

    What arrives lies here until `finish`: where a process is lost, nobody knows what MPI still receives.

    Args:
      array: this process's values, flat; the sum, when it has finished. It must not be touched until then, nor written
        to while it is sent.

    Attributes:
      outgoing: what is sent. All of it is over when all others have finished.
    """

    def __init__(self, comm: Any, array: np.ndarray):
        self._comm, self._array = comm, array
        bounds = [array.size * rank // comm.size for rank in range(comm.size + 1)]
        self._shares = [array[start:stop] for start, stop in pairwise(bounds)]
        self._own = self._shares[comm.rank]
        self._others = [(comm.rank + i) % comm.size for i in range(1, comm.size)]  # not all to the same at first
        self._arrives: list[np.ndarray] = []
        self._incoming: list[Any] = []
        self.outgoing: list[Any] = []

    def begin(self) -> None:
        """Send the others their shares of this process's values. Waits for nobody."""
        self._arrives = list(np.empty((len(self._others), self._own.size), self._array.dtype))
        for other, row in zip(self._others, self._arrives, strict=True):
            self._incoming.append(self._comm.Irecv(row, other, _TO_ADD))
        for other in self._others:
            self.outgoing.append(self._comm.Isend(self._shares[other], other, _TO_ADD))

    def add(self) -> None:
        """Wait for the others' values of this process's share, and send them their sum."""
        self._wait()
        with np.errstate(over="ignore", invalid="ignore"):  # as MPI's own sums are
            for row in self._arrives:
                self._own += row
        self._arrives = [np.empty_like(self._shares[other]) for other in self._others]
        for other, share in zip(self._others, self._arrives, strict=True):
            self._incoming.append(self._comm.Irecv(share, other, _ADDED))
        for other in self._others:
            self.outgoing.append(self._comm.Isend(self._own, other, _ADDED))

    def finish(self) -> None:
        """Wait until the whole sum is here."""
        self._wait()
        # Who has sent the sum of its share has received what was sent to it for that, from the same place.
        for other, share in zip(self._others, self._arrives, strict=True):
            self._shares[other][:] = share

    def _wait(self) -> None:
        while self._incoming:
            self._incoming[0].Wait()
            del self._incoming[0]
