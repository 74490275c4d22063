"""The result of one step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from .finite import Trouble
from .microbatches import Microbatches

if TYPE_CHECKING:
    from .step_plan import StepPlan


class Outcome(NamedTuple):
    """The result of one step. Hook values and metrics are replicated, and on the first worker's device.

    Attributes:
      results: those of the final segment (`Plan.final_outputs`); empty if the step was not committed.
      compute_seconds: by local index; NaN if the step ended before its last message.
      microbatches: sizes of microbatches, by local index.
      trouble: why the step was not committed, or `None`.
    """

    steps: StepPlan
    results: list[Any]
    compute_seconds: list[float]
    microbatches: list[Microbatches]
    messages: int
    message_bytes: int
    trouble: Trouble | None = None

    @property
    def hooks(self) -> list[list[jax.Array]]:
        """The leaves of each hook's values."""
        return [self.results[place] for place in self.steps.hooks]

    @property
    def metrics(self) -> list[jax.Array]:
        """The leaves of the metrics."""
        return self.results[self.steps.metrics]

    @property
    def committed(self) -> bool:
        """Whether the step has changed the state."""
        return self.trouble is None
