"""The preamble: the first collective of every operation, which detects processes that are in different operations.

MPI matches collectives only by their order: ranks in different collectives receive each other's data, or wait forever.
Each operation therefore begins with an Allreduce of `NUMBERS` float64s that is the same for all operations. In it, each
process contributes the number x of the operation that it is about to do, and x². If for p processes

    sum x = p x_own    and    sum x^2 = p x_own^2

then the variance of x is 0, so all numbers are equal; and if one process finds this, all do. Applied to 16 bits at a
time, these sums are exact for up to a million processes. The rest of the buffer has room for small messages, which
then need no Allreduce of their own.
"""

from __future__ import annotations

from functools import partial
from struct import Struct

import numpy as np

NUMBERS = 128  # 1 kB: half a microsecond more than the smallest Allreduce, in shared memory
_HEADER = Struct("=4d")


class Preamble:
    """The buffer of the preamble, an in-place Allreduce by MPI.SUM.

    Attributes:
      numbers: the buffer.
      room: the part of the buffer that is free for a message.
      heard: after the Allreduce, returns the sums over all processes.
      expected: the sums if all processes have announced the same number. Either all processes find `heard()` equal to
        it, or none does.
    """

    def __init__(self, processes: int = 1):
        self.numbers = np.zeros(NUMBERS)
        self.room = self.numbers[4:]
        self._bytes = self.numbers.view(np.uint8).data
        self._processes = processes
        self.heard = partial(_HEADER.unpack_from, self._bytes)  # C code, because every message calls it
        self.expected = (0.0, 0.0, 0.0, 0.0)

    def set_processes(self, processes: int) -> None:
        """Set the number of processes that take part."""
        self._processes = processes

    def announce(self, number: int) -> None:
        """Write the 32-bit number of the operation that this process is about to do."""
        high, low, p = float(number >> 16), float(number & 0xFFFF), self._processes
        _HEADER.pack_into(self._bytes, 0, high, high * high, low, low * low)
        self.expected = (p * high, p * high * high, p * low, p * low * low)
