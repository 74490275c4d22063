"""One worker's chooser of microbatches, and the sizes whose kernels it keeps."""

from __future__ import annotations

from collections.abc import Iterable, Set

from adaptive.runtime.microbatches import Microbatches

from .choice import Chooser

KEPT = 16  # minimum number of sizes, besides buckets, whose kernels a worker keeps


class WorkerKernels:
    """What one worker needs of its kernels. Memory does not grow with each new size, because old kernels are dropped.

    Attributes:
      chooser: chooses the worker's microbatches.
      asked: the size requested last by `Kernels.ask`.
      current: the size of the steps until the requested one is in force.
      exact: the last size for which an exact kernel was requested.
    """

    def __init__(self, chooser: Chooser):
        self.chooser = chooser
        self.asked = self.current = self.exact = 0
        self._used: dict[int, None] = {}  # sizes of microbatches, the most recently used last

    def note_used(self, microbatches: Microbatches) -> None:
        """Record the microbatches of a step."""
        for size in set(microbatches):
            self._used.pop(size, None)
            self._used[size] = None

    def forget_outdated(self, ready: Iterable[int], buckets: Set[int]) -> list[int]:
        """Return the sizes whose kernels should be dropped, the least recently used first, and forget their timings.

        Keeps what the next steps may use: buckets, the microbatches of the last step, the current size, and the
        requested one, which this process may have announced as ready.
        """
        needed = {*buckets, *self.chooser.choice.microbatches, self.current, self.asked, self.exact}
        last_use = {size: when for when, size in enumerate(self._used)}
        spare = sorted((s for s in ready if s not in needed), key=lambda s: last_use.get(s, -1))
        outdated = spare[: max(0, len(spare) - KEPT)]
        for size in outdated:
            self._used.pop(size, None)
            self.chooser.forget(size)
        return outdated
