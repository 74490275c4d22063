"""The result of one step."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from .finite import Trouble
from .microbatches import Microbatches


@dataclass
class Outcome:
    """The result of one step. Hook values and metrics are replicated, and on the first worker's device.

    Attributes:
      hooks: the leaves of each hook's values.
      metrics: the leaves of the metrics.
      reduced: the reduced parts, by message and local index. Valid until the next step.
      compute_seconds: by local index; NaN if the step ended before its last message.
      microbatches: sizes of microbatches, by local index.
      trouble: why the step was not committed, or `None`.
    """

    hooks: list[list[jax.Array]]
    metrics: list[jax.Array]
    reduced: dict[int, list[list[jax.Array]]]
    compute_seconds: list[float]
    microbatches: list[Microbatches]
    messages: int
    message_bytes: int
    trouble: Trouble | None = None

    @property
    def committed(self) -> bool:
        """Whether the step has changed the state."""
        return self.trouble is None
