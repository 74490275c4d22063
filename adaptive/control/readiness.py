"""Whether this process can run requested batch sizes yet: at once, or when their kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from adaptive.runtime.kernels import Kernels


class Readiness:
    """Prepares steps with new batch sizes. This one is ready for any sizes at any time, as simulated workers are.

    Arguments hold the sizes of all workers; results are about this process.
    """

    def ready_for(self, sizes: Sequence[int]) -> bool:
        """Return whether this process can run steps of these sizes now."""
        return True

    def ready_for_any(self) -> bool:
        """Return whether this process can run steps of any sizes, from now on."""
        return True

    def prepare(self, sizes: Sequence[int], current: Sequence[int]) -> None:
        """Prepare for these sizes in the background; cancel earlier preparations. `current`: those of the next step."""

    def wait_for(self, sizes: Sequence[int]) -> None:
        """Wait until this process can run steps of these sizes."""


class KernelsOf(Readiness):
    """Readiness by compiled kernels of this process's workers.

    Args:
      workers: the worker slots of this process.
      expect: called with the sizes of all workers before a question about their kernels.
    """

    def __init__(self, kernels: Kernels, workers: range, expect: Callable[[Sequence[int]], None]):
        self._kernels, self._workers, self._expect = kernels, workers, expect

    def _own(self, sizes: Sequence[int]) -> list[int]:
        self._expect(sizes)
        return [sizes[worker] for worker in self._workers]

    def ready_for(self, sizes: Sequence[int]) -> bool:
        return all(self._kernels.can_make(local, size) for local, size in enumerate(self._own(sizes)))

    def ready_for_any(self) -> bool:
        return self._kernels.makes_all

    def prepare(self, sizes: Sequence[int], current: Sequence[int]) -> None:
        now, own = self._own(current), self._own(sizes)
        if tuple(sizes) != tuple(current):  # the current sizes have their kernels
            self._kernels.extend(max(own) or max(sizes))
        self._kernels.ask(own, now)

    def wait_for(self, sizes: Sequence[int]) -> None:
        self._kernels.require(self._own(sizes))
