"""Examples that are copied to an accelerator before the step that reads them, while kernels run there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from .kernels.memory_bound import ran_out_of_memory
from .microbatches import Microbatches

COPIED_BYTES = 1 << 18  # a batch of fewer bytes is copied when its kernel is dispatched


class CopiedExamples:
    """The batch of one worker that was copied last.

    Args:
      device: the worker's device.
      inputs: indices of the batch's leaves that kernels read.

    Attributes:
      wanted: whether batches are to be copied. Not those that run as several microbatches, since cutting arrays on the
        device takes a program.
      last: the batch as it was read, and its leaves, those in `inputs` on the device; `None` if none was copied.
    """

    def __init__(self, device: jax.Device, inputs: Sequence[int]):
        self._device, self._inputs = device, inputs
        self.wanted = False
        self.last: tuple[Any, list[Any]] | None = None

    def leaves_of(self, batch: Any, sizes: Microbatches) -> list[Any] | None:
        """Return the leaves of a batch on the device, if it was copied and runs as one microbatch; else `None`."""
        last = self.last
        return last[1] if last is not None and last[0] is batch and len(sizes) == 1 else None

    def copy(self, batches: Sequence[Any]) -> None:
        """Start to copy a batch. Called by the thread that has read it.

        Args:
          batches: the worker's batch; `None` for a worker without examples.
        """
        (batch,) = batches
        if batch is None or not self.wanted:
            return
        leaves = jax.tree.leaves(batch)
        if sum(leaves[i].nbytes for i in self._inputs) < COPIED_BYTES:
            return
        try:
            for i in self._inputs:
                leaves[i] = jax.device_put(leaves[i], self._device)
            self.last = batch, leaves
        except jax.errors.JaxRuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            self.last = None  # copied when the kernel is dispatched, with more room
