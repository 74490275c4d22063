"""A seqlock with two slots, so that a worker can publish while others take consistent copies.

A worker's place in memory is a header and two *slots*, which are written alternately:

    begun   number of publications begun        written before the slot
    done    number of publications done         written after the slot; slot `done % 2` is the latest
    rounds  round of each slot's content

A reader copies the header, the latest slot, and the header again. If no two more publications have begun meanwhile, the
slot was not written while it was read. Otherwise the copy may be torn, and the reader tries again, a few times. Fences
keep reads and writes in this order; no lock is held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from adaptive.base.mailbox import Vectors

_HEADER = 64  # bytes: one cache line, for four numbers
_LINE = 64
_TRIES = 3

Copy = Callable[[int, np.ndarray], None]  # fills an array of bytes from an offset on


class SlotLayout:
    """The layout of a process's memory: a place per worker, each with a header and two slots.

    Args:
      nbytes: sizes of the vectors that each worker publishes.

    Attributes:
      slot: bytes of one publication.
      place: bytes of one worker's place.
      torn: number of copies that were started again so far.
    """

    def __init__(self, nbytes: Sequence[int]):
        self._nbytes = tuple(nbytes)
        lines = [-(-n // _LINE) * _LINE for n in nbytes]
        self._starts: list[int] = np.cumsum([0, *lines]).tolist()
        self.slot = self._starts[-1]
        self.place = _HEADER + 2 * self.slot
        self.torn = 0

    def vectors(self, slot: np.ndarray) -> Vectors:
        """Return the published vectors, as views of a copy of their slot."""
        return [slot[start : start + n] for start, n in zip(self._starts, self._nbytes, strict=False)]

    def write(self, place: np.ndarray, round: int, vectors: Vectors, fence: Callable[[], None]) -> None:
        """Publish vectors: write the older slot, and then mark it as the latest."""
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
        """Return the number of the latest publication of this process's worker `i`; 0 if none is of this round."""
        header = self._header(copy, i)
        return header[1] if header[2 + header[1] % 2] == round else 0

    def copy_latest(self, copy: Copy, i: int, round: int, room: np.ndarray) -> int:
        """Copy the latest slot of this process's worker `i` consistently.

        Args:
          copy: copies from the process's memory.
          i: number of the worker in its process.
          round: the round.
          room: receives the slot.

        Returns:
          The number of the publication; 0 if there is none of this round, or every attempt may be torn.
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
