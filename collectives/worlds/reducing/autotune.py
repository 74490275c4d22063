"""Which of several ways is taken: the faster one, by the same measured times on all processes.

Ways are measured by messages that have to be sent in any case: the first go each way in turn, and the least time of
each counts, which is without what happens once, as connections that are opened. From then on all go by the faster way.
Its times are still taken: when the best of many messages is off by half, the network is another than it was, or the
measurement was, and all begins anew.

A time is that of the slowest process: they compare times when `due`, which is after the same message on all, and by
nothing else. So all take the same way, without asking each other before a message.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

TRIALS = 3  # of each way
MESSAGES = 32  # between two looks whether times are as they were
DRIFT = 1.5
KEPT = 64  # choices: a program has one for each of its large messages; eager calls may have any number

TuningKey = tuple[Hashable, int]  # a channel, and a number of what its message is made of


class Autotuner:
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


class AutotunerCache:
    """Of the latest messages.

    Args:
      names: of the ways.
    """

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._choices: dict[TuningKey, Autotuner] = {}  # the latest last

    def of(self, key: TuningKey) -> Autotuner:
        """A message's; a new one, if it has none. It is not kept before `keep`."""
        return self._choices.get(key) or Autotuner(len(self._names))

    def keep(self, key: TuningKey, choice: Autotuner) -> None:
        """It is that of the latest message."""
        self._choices.pop(key, None)
        self._choices[key] = choice
        if len(self._choices) > KEPT:
            del self._choices[next(iter(self._choices))]

    def latest(self, channel: Hashable) -> Autotuner | None:
        """The choice of a channel's latest message."""
        return next((choice for key, choice in reversed(self._choices.items()) if key[0] == channel), None)

    def forget(self) -> None:
        """All of them: others are together now."""
        self._choices.clear()

    def in_words(self, channel: Hashable) -> str:
        """Which way a channel's messages take, and why; nothing where it has none. Replicated."""
        choice = self.latest(channel)
        if choice is None:
            return ""
        if choice.seconds is None:
            return f"{' and '.join(self._names)} in turn, to measure which is faster"
        taken, *others = sorted(zip(choice.seconds, self._names, strict=True))
        times = ", ".join(f"{name} {_milliseconds(seconds)}" for seconds, name in others)
        return f"{taken[1]}: {_milliseconds(taken[0])}, {times}; as measured up to {choice.about}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{1e3 * seconds:.0f} ms"
