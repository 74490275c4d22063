"""`Computed`: kernels of a step that are already dispatched."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from .microbatches import Microbatches


class Computed(NamedTuple):
    """Kernels of a step that are already dispatched, and their inputs: those of the next step, or of a step that could
    not be completed, because others were lost.
    """

    step: int
    sizes: Microbatches
    batch: Any
    state: list[jax.Array]
    op_states: list[list[jax.Array]]
    packed: list[jax.Array]
    kept: list[jax.Array]
    dispatched: float
    seconds: float = 0.0  # until they had ended; 0 if that is unknown
    finite: jax.Array | None = None  # the result of the check, if it is dispatched too
