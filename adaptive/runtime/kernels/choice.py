"""The microbatches of one worker in the next steps."""

from __future__ import annotations

from dataclasses import dataclass

from adaptive.runtime.microbatches import Microbatches


@dataclass(slots=True, eq=False)
class Choice:
    """The microbatches of one worker in the next steps. The same object is used while nothing changes.

    Attributes:
      size: examples of the worker.
      at_least: the minimum number of microbatches in the step.
      microbatches: examples of each microbatch; empty for a worker without examples.
      steps: the number of steps after the next one for which it is valid. Counted down by the code that runs the steps.
    """

    size: int
    at_least: int
    microbatches: Microbatches
    steps: int = 0


NO_CHOICE = Choice(-1, 0, ())
