"""When sizes that were asked for can be made: at once, when kernels are compiled, or after some steps.

And what the kernel calls cost that they are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from adaptive.runtime.kernels import Kernels


class Readiness(Protocol):
    """What steps of some sizes need. Sizes are of all workers; what is told is of this process's. Local."""

    def ready_for(self, sizes: Sequence[int]) -> bool:
        """Whether steps of these sizes can be made now."""
        ...

    def ready_for_any(self) -> bool:
        """Whether steps of any sizes can be made, now and from now on."""
        ...

    def prepare(self, sizes: Sequence[int], current: Sequence[int]) -> None:
        """Get ready for these sizes, beside the steps, and for what was asked for before no more.

        Args:
          current: the sizes of the next step.
        """
        ...

    def wait_for(self, sizes: Sequence[int]) -> None:
        """Return when steps of these sizes can be made."""
        ...

    def call_overhead(self) -> float | None:
        """Return the cost of one more kernel call, in examples; None while it is unknown."""
        ...


class AtOnce:
    """Any sizes, at any time: of workers that run nothing."""

    def ready_for(self, sizes: Sequence[int]) -> bool:
        return True

    def ready_for_any(self) -> bool:
        return True

    def prepare(self, sizes: Sequence[int], current: Sequence[int]) -> None:
        return None

    def wait_for(self, sizes: Sequence[int]) -> None:
        return None

    def call_overhead(self) -> float | None:
        return 0.0


class KernelsOf:
    """Those of which the kernels of this process's workers make batches.

    Args:
      workers: of this process.
      expect: told of the sizes of all workers before their kernels are asked about.
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
        if tuple(sizes) != tuple(current):  # those in force are made of what there is
            self._kernels.extend(max(own) or max(sizes))
        self._kernels.ask(own, now)

    def wait_for(self, sizes: Sequence[int]) -> None:
        self._kernels.require(self._own(sizes))

    def call_overhead(self) -> float | None:
        return self._kernels.call_examples
