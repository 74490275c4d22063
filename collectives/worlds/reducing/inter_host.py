"""A nonblocking sum over hosts, by one process of each host.

Each process sums one share of the elements: it receives this share from all others, adds, and sends the sum to them.
Each of h hosts therefore sends 2 (h - 1) / h of the array, in two steps. Each element is summed at one place in one
order, so all hosts have the same bits.

When a process is lost, Open MPI (5.0.11) crashes in requests that are waited for together ("error after request
freed"): it frees the unfinished ones with the failed one, and data that arrive for them later cause an error that
cannot be handled. Receives are therefore waited for one by one, and sends only when they are known to have arrived.
Requests under way when a process is lost are not waited for, and their memory is kept (`hierarchical.py`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

_TO_ADD, _ADDED = 7105, 7106


class InterHostSum:
    """One sum over hosts. Call `begin`, then `add`, then `finish`; they raise MPI's errors.

    If several sums are under way, all processes must call these methods in the same order. Received data are kept until
    `finish`, because after a loss it is unknown which of them MPI still writes.

    Args:
      comm: the communicator of one process per host.
      array: this process's values; shape=(elements,). Holds the sum after `finish`; do not use it before that.

    Attributes:
      outgoing: the send requests. All are complete when all processes have finished.
    """

    def __init__(self, comm: Any, array: np.ndarray):
        self._comm, self._array = comm, array
        bounds = [array.size * rank // comm.size for rank in range(comm.size + 1)]
        self._shares = [array[start:stop] for start, stop in pairwise(bounds)]
        self._own = self._shares[comm.rank]
        self._others = [(comm.rank + i) % comm.size for i in range(1, comm.size)]  # each starts with another
        self._arrives: list[np.ndarray] = []
        self._incoming: list[Any] = []
        self.outgoing: list[Any] = []

    def begin(self) -> None:
        """Start to send every other process its share of this process's values. Does not block."""
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
        """Wait until the whole sum has been received."""
        self._wait()
        # A process sends its share's sum only after it has received all values of the share, so their memory is free.
        for other, share in zip(self._others, self._arrives, strict=True):
            self._shares[other][:] = share

    def _wait(self) -> None:
        while self._incoming:
            self._incoming[0].Wait()
            del self._incoming[0]
