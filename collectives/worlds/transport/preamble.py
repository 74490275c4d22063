"""What every collective of several processes begins with, so that ranks which mean different things find out.

MPI matches collectives by their order alone: a rank that is in another one is answered with numbers that mean something
else, or never. So each begins with one Allreduce that is the same for all, of `NUMBERS` float64s: the *frame*. In it
every process adds the number of what it is about to do, and its square. If p processes with the numbers x sum to

    sum x = p x_own    and    sum x^2 = p x_own^2

then the variance of x is 0, so all have the same; and if one process sees that it is so, all do. Half of 32 bits at a
time, these sums are exact for a million processes. What is left of the frame has room for small messages, which
so cost one Allreduce as they did before.
"""

from __future__ import annotations

from functools import partial
from struct import Struct

import numpy as np

NUMBERS = 128  # 1 kB: half a microsecond more than the least Allreduce, in shared memory
_NAME = Struct("=4d")


class Preamble:
    """The buffer of one Allreduce by MPI.SUM, in place.

    Attributes:
      numbers: the buffer.
      room: the part of it that is free for a message.
      heard: after the Allreduce, returns what all processes have announced, summed.
      expected: what that is if all have announced the same. Replicated: it is equal to what was heard on all processes,
        or on none.
    """

    def __init__(self, processes: int = 1):
        self.numbers = np.zeros(NUMBERS)
        self.room = self.numbers[4:]
        self._bytes = self.numbers.view(np.uint8).data
        self._processes = processes
        self.heard = partial(_NAME.unpack_from, self._bytes)  # no Python function: each message calls it
        self.expected = (0.0, 0.0, 0.0, 0.0)

    def of(self, processes: int) -> None:
        """So many processes are together from now on."""
        self._processes = processes

    def announce(self, number: int) -> None:
        """Write what this process is about to do: a number of 32 bits."""
        high, low, p = float(number >> 16), float(number & 0xFFFF), self._processes
        _NAME.pack_into(self._bytes, 0, high, high * high, low, low * low)
        self.expected = (p * high, p * high * high, p * low, p * low * low)
