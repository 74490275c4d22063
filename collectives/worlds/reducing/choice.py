"""Which of several ways is taken: the faster one, by the same measured times on all processes.

Ways are measured by messages that have to be sent in any case: the first go each way in turn, and the least time of
each counts, which is without what happens once, as connections that are opened. From then on all go by the faster way.
Its times are still taken: when the best of many messages is off by half, the network is another than it was, or the
measurement was, and all begins anew.

A time is that of the slowest process: they compare times when `due`, which is after the same message on all, and by
nothing else. So all take the same way, without asking each other before a message.
"""

from __future__ import annotations

import numpy as np

TRIALS = 3  # of each way
MESSAGES = 32  # between two looks whether times are as they were
DRIFT = 1.5


class Choice:
    """Of so many ways, for messages of one size.

    Attributes:
      seconds: what each takes; `None` until it is measured. Replicated.
      about: the message by which that was known, in words. Replicated.
    """

    def __init__(self, ways: int):
        self._ways = ways
        self._times: list[float] = []  # this process's, since times were compared
        self.seconds: tuple[float, ...] | None = None
        self.about = ""

    @property
    def way(self) -> int:
        """The number of the way that the next message takes. Replicated."""
        if self.seconds is None:
            return len(self._times) % self._ways
        return int(np.argmin(self.seconds))

    def took(self, seconds: float) -> None:
        """The message has arrived, after so long here."""
        self._times.append(seconds)

    @property
    def due(self) -> np.ndarray | None:
        """If times are to be compared now, this process's; which all then give to `compare`, each the largest of all.
        Whether they are is replicated.
        """
        enough = MESSAGES if self.seconds else TRIALS * self._ways
        return np.array(self._times) if len(self._times) == enough else None

    def compare(self, slowest: np.ndarray, about: str) -> None:
        """Choose by these times, or look whether they are as they were. All ranks do so, behind the same message."""
        self._times = []
        if self.seconds is None:
            self.seconds = tuple(slowest.reshape(TRIALS, self._ways).min(axis=0).tolist())
            self.about = about
        elif not 1 / DRIFT <= slowest.min() / min(self.seconds) <= DRIFT:
            self.seconds = None
