"""A number that tells whether anything has changed on which prepared work depends."""

from __future__ import annotations

import itertools


class Revision:
    """The revision of a program. Every change on which a prepared step depends gives it another number.

    Changes may come from any thread: numbers are never used twice, so a reader that finds the same number has missed no
    change.

    Attributes:
      number: the current revision.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.number = 0

    def increment(self) -> None:
        """Record a change."""
        self.number = next(self._numbers)
