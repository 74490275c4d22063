"""Autotuning: selects the fastest of several algorithms, the same on all processes.

Algorithms are measured on real messages: the first messages take each algorithm in turn, and the least time of each
counts, which excludes one-time costs such as opening connections. All later messages take the fastest one. Its times
are still recorded: if the least time over many messages is off by half, the network has changed or the measurement was
wrong, and tuning starts again.

A message's time is that of the slowest process. Processes compare times when `due`, after the same message on all of
them. They therefore take the same algorithm, without communication before a message.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

TRIALS = 3  # of each algorithm
MESSAGES = 32  # between two checks whether times have changed
DRIFT = 1.5
KEPT = 64  # tuners: a program has one for each of its large messages; eager calls may have any number

TuningKey = tuple[Hashable, int]  # a channel, and a number that encodes the layout of its messages


class Autotuner:
    """Chooses the fastest of several algorithms, for messages of one layout.

    Attributes:
      seconds: the time of each algorithm; None until it is measured. Replicated.
      about: description of the message after which the times were compared. Replicated.
    """

    def __init__(self, algorithms: int):
        self._algorithms = algorithms
        self._times: list[float] = []  # this process's, since times were compared
        self.seconds: tuple[float, ...] | None = None
        self.about = ""

    @property
    def choice(self) -> int:
        """Index of the algorithm for the next message. Replicated."""
        if self.seconds is None:
            return len(self._times) % self._algorithms
        return int(np.argmin(self.seconds))

    def record(self, seconds: float) -> None:
        """Record the time of a message on this process."""
        self._times.append(seconds)

    @property
    def due(self) -> np.ndarray | None:
        """This process's times if they must be compared now, else None (on all processes or on none).

        All processes then call `compare` with the elementwise maximum over processes.
        """
        enough = MESSAGES if self.seconds else TRIALS * self._algorithms
        return np.array(self._times) if len(self._times) == enough else None

    def compare(self, slowest: np.ndarray, about: str) -> None:
        """Choose an algorithm by these times, or check them for changes. Called by all ranks after the same message."""
        self._times = []
        if self.seconds is None:
            self.seconds = tuple(slowest.reshape(TRIALS, self._algorithms).min(axis=0).tolist())
            self.about = about
        elif not 1 / DRIFT <= slowest.min() / min(self.seconds) <= DRIFT:
            self.seconds = None


class AutotunerCache:
    """A cache of tuners, by message.

    Args:
      names: names of the algorithms.
    """

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._tuners: dict[TuningKey, Autotuner] = {}  # the latest last

    def get(self, key: TuningKey) -> Autotuner:
        """Return the tuner of a message; a new one if there is none, which is cached only by `keep`."""
        return self._tuners.get(key) or Autotuner(len(self._names))

    def keep(self, key: TuningKey, tuner: Autotuner) -> None:
        """Cache a message's tuner as the latest one; drop the oldest."""
        self._tuners.pop(key, None)
        self._tuners[key] = tuner
        if len(self._tuners) > KEPT:
            del self._tuners[next(iter(self._tuners))]

    def latest(self, channel: Hashable) -> Autotuner | None:
        """Return the tuner of a channel's latest message."""
        return next((tuner for key, tuner in reversed(self._tuners.items()) if key[0] == channel), None)

    def clear(self) -> None:
        """Discard all measurements; called when the set of processes has changed."""
        self._tuners.clear()

    def describe(self, channel: Hashable) -> str:
        """Describe which algorithm a channel's messages take, and why; "" if there is no tuner. Replicated."""
        tuner = self.latest(channel)
        if tuner is None:
            return ""
        if tuner.seconds is None:
            return f"{' and '.join(self._names)} in turn, to measure which is faster"
        taken, *others = sorted(zip(tuner.seconds, self._names, strict=True))
        times = ", ".join(f"{name} {_milliseconds(seconds)}" for seconds, name in others)
        return f"{taken[1]}: {_milliseconds(taken[0])}, {times}; as measured up to {tuner.about}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{1e3 * seconds:.0f} ms"
