"""A sum over hosts, in which one process of each takes part, while these processes do other work.

Each process sums one share of the elements: it receives this share from all others, adds up, and sends the sum to them.
So each of h hosts sends 2 (h - 1) / h of the array; each element is summed at one place, in one order, so all have the
same bits; and it takes two steps however many hosts there are.

When processes are lost, Open MPI (5.0.11) crashes in requests that are waited for together ("error after request
freed"): it frees the unfinished ones with the one that failed, and what still arrives for them is an error that cannot
be handled. So what is received is waited for one by one; what is sent, only when it is known to have arrived; and what
is under way when a process is lost is not waited for, and its memory is kept (`hierarchical.py`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

_TO_ADD, _ADDED = 7105, 7106


class InterHostSum:
    """One such sum: `begin`, then `add`, then `finish`; they raise MPI's errors. With several sums under way, all
    processes take the same steps in the same order.

    What arrives is kept here until `finish`: after a loss it is not known what MPI still receives.

    Args:
      array: this process's values, flat; after `finish`, the sum. It must not be used before that, nor written to
        while it is sent.

    Attributes:
      outgoing: the requests that send. All are complete when all processes have finished.
    """

    def __init__(self, comm: Any, array: np.ndarray):
        self._comm, self._array = comm, array
        bounds = [array.size * rank // comm.size for rank in range(comm.size + 1)]
        self._shares = [array[start:stop] for start, stop in pairwise(bounds)]
        self._own = self._shares[comm.rank]
        self._others = [(comm.rank + i) % comm.size for i in range(1, comm.size)]  # each rank starts with another one
        self._arrives: list[np.ndarray] = []
        self._incoming: list[Any] = []
        self.outgoing: list[Any] = []

    def begin(self) -> None:
        """Start to send the others their shares of this process's values. Does not block."""
        self._arrives = list(np.empty((len(self._others), self._own.size), self._array.dtype))
        for other, row in zip(self._others, self._arrives, strict=True):
            self._incoming.append(self._comm.Irecv(row, other, _TO_ADD))
        for other in self._others:
            self.outgoing.append(self._comm.Isend(self._shares[other], other, _TO_ADD))

    def add(self) -> None:
        """Wait for the others' values of this process's share, and start to send them the sum."""
        self._wait()
        with np.errstate(over="ignore", invalid="ignore"):  # as in MPI's own sums
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
        # A process that sends the sum of its share has received all that was sent to it for that, from these places.
        for other, share in zip(self._others, self._arrives, strict=True):
            self._shares[other][:] = share

    def _wait(self) -> None:
        while self._incoming:
            self._incoming[0].Wait()
            del self._incoming[0]
