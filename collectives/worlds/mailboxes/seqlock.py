"""Places in memory at which workers publish, and from which whole copies are taken while they go on publishing.

A place is a header and two *slots*, which are written in turn:

    begun   how many publications have been begun        written before the slot
    done    how many are done                            written behind it: slot `done % 2` is the latest
    rounds  of what is in the slots

A reader takes the header, the latest slot, and the header again: unless two more publications have been begun meanwhile
the slot was not written while it was read. If they have, what it holds may be torn, and the reader begins anew; a few
times, and then goes without. Reads and writes are kept in this order by fences; nobody ever holds a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from adaptive.extend import Vectors

_HEADER = 64  # bytes; four numbers, in a line of the cache of their own
_LINE = 64
_TRIES = 3

Copy = Callable[[int, np.ndarray], None]  # of as many bytes as there is room for, from a start


class SlotLayout:
    """Where things are in the memory of a process.

    Args:
      nbytes: of the vectors that each worker publishes.

    Attributes:
      slot: bytes of one publication; `place`: of what a worker has.
      torn: copies that were begun anew so far.
    """

    def __init__(self, nbytes: Sequence[int]):
        self._nbytes = tuple(nbytes)
        lines = [-(-n // _LINE) * _LINE for n in nbytes]
        self._starts: list[int] = np.cumsum([0, *lines]).tolist()
        self.slot = self._starts[-1]
        self.place = _HEADER + 2 * self.slot
        self.torn = 0

    def vectors(self, slot: np.ndarray) -> Vectors:
        """What was published, from a copy of its slot. Views."""
        return [slot[start : start + n] for start, n in zip(self._starts, self._nbytes, strict=False)]

    def write(self, place: np.ndarray, round: int, vectors: Vectors, fence: Callable[[], None]) -> None:
        """Write the slot that nobody is sent to yet, and then send them there."""
        header = place[:_HEADER].view(np.int64)
        number = int(header[1]) + 1
        slot = place[_HEADER + number % 2 * self.slot :]
        header[0] = number
        fence()
        header[2 + number % 2] = round
        for start, vector in zip(self._starts, vectors, strict=False):
            slot[start : start + vector.nbytes] = vector.reshape(-1).view(np.uint8)
        fence()
        header[1] = number
        fence()

    def number(self, copy: Copy, i: int, round: int) -> int:
        """Which publication of this process's worker `i` is the latest; 0 if none of this round is."""
        header = self._header(copy, i)
        return header[1] if header[2 + header[1] % 2] == round else 0

    def take(self, copy: Copy, i: int, round: int, room: np.ndarray) -> int:
        """Copy the latest slot of this process's worker `i`, whole.

        Args:
          room: for one slot.

        Returns:
          Which publication it is; 0 if there is none of this round, or it was written again and again meanwhile.
        """
        header = self._header(copy, i)
        for _ in range(_TRIES):
            number = header[1]
            if not number or header[2 + number % 2] != round:
                return 0
            copy(i * self.place + _HEADER + number % 2 * self.slot, room)
            header = self._header(copy, i)
            if header[0] < number + 2:
                return number
            self.torn += 1
        return 0

    def _header(self, copy: Copy, i: int) -> list[int]:
        numbers = np.zeros(4, np.int64)
        copy(i * self.place, numbers.view(np.uint8))
        return numbers.tolist()
