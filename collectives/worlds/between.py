"""A sum over hosts, of which one process each takes part, while these do other things.

Each sums one share of the elements: it is sent this share by all others, adds up, and sends the sum to them. So of h
hosts each sends 2 (h - 1) / h of the array; each element is summed at one place, in one order, so all have the same
bits; and it takes two steps however many hosts there are.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

_TO_ADD, _ADDED = 7105, 7106


class Between:
    """One such sum: `begin`, then `add`, then `finish`. Of several under way all processes take the same steps in the
    same order.

    Args:
      array: this process's values, flat; the sum, when it has finished. It must not be touched until then.

    What its methods raise is MPI's. Then it is to be kept, and `let_go`.
    """

    def __init__(self, mpi: Any, comm: Any, array: np.ndarray):
        self._mpi, self._comm, self._array = mpi, comm, array
        self._bounds = [array.size * rank // comm.size for rank in range(comm.size + 1)]
        self._others = [(comm.rank + i) % comm.size for i in range(1, comm.size)]  # not all to the same at first
        self._own = self._share(comm.rank)
        self._rows = np.empty((len(self._others), self._own.size), array.dtype)
        self._requests: list[Any] = []

    def begin(self) -> None:
        """Send the others their shares of this process's values. Waits for nobody."""
        for row, other in zip(self._rows, self._others, strict=True):
            self._requests.append(self._comm.Irecv(row, other, _TO_ADD))
        for other in self._others:
            self._requests.append(self._comm.Isend(self._share(other), other, _TO_ADD))

    def add(self) -> None:
        """Wait for the others' values of this process's share, and send them their sum."""
        self._wait()  # for what is sent, too: sums arrive where it lies
        with np.errstate(over="ignore", invalid="ignore"):  # as MPI's own sums are
            for row in self._rows:
                self._own += row
        for other in self._others:
            self._requests.append(self._comm.Irecv(self._share(other), other, _ADDED))
        for other in self._others:
            self._requests.append(self._comm.Isend(self._own, other, _ADDED))

    def finish(self) -> None:
        """Wait until the whole sum is here."""
        self._wait()

    def let_go(self) -> None:
        """Of a communicator that is revoked: wait until MPI does not touch the array any more."""
        for request in self._requests:
            with suppress(self._mpi.Exception):
                request.Wait()
        self._requests.clear()

    def _share(self, rank: int) -> np.ndarray:
        return self._array[self._bounds[rank] : self._bounds[rank + 1]]

    def _wait(self) -> None:
        self._mpi.Request.Waitall(self._requests)
        self._requests.clear()
