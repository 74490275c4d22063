"""What follows when memory runs out in a step: smaller microbatches and the same step again, or a clear error.

The kernels of gradients are given no memory to overwrite, so they can run again. The final segment, which computes the
new state, is given the old state's memory, and cannot.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from adaptive.base.errors import OutOfMemoryError

from .kernels.memory_bound import ADVICE, no_smaller_one, ran_out_of_memory
from .microbatches import Microbatches
from .step_plan import StepContext


class LocalBatchTooLarge(Exception):
    """A kernel of a driver whose batches cannot be split ran out of memory; all workers are in this process.

    Attributes:
      examples: the largest local batch that may fit.
    """

    def __init__(self, examples: int):
        super().__init__(f"a local batch of {2 * examples} examples ran out of memory")
        self.examples = examples


def make_room(
    ctx: StepContext, error: jax.errors.JaxRuntimeError, microbatches: Sequence[Microbatches], *, sent: bool
) -> None:
    """Halve the largest microbatch of a step in which memory ran out, so that the step can be taken again.

    Args:
      microbatches: those of the step, by local index.
      sent: whether the step has already sent a message.

    Raises:
      JaxRuntimeError: `error`, if memory did not run out, or `max_local_batch` is not "auto".
      OutOfMemoryError: the step cannot be taken again.
      LocalBatchTooLarge: it can be taken again with a smaller local batch.
    """
    if not ran_out_of_memory(error):
        raise error
    if ctx.kernels.memory is None:
        error.add_note(ADVICE)
        raise error
    _check_state(ctx, error)
    largest = max(size for of_worker in microbatches for size in of_worker)
    if sent:
        raise OutOfMemoryError(
            f"memory ran out in a microbatch of {largest} examples, after a message of the step had been sent, so the "
            f"step cannot be taken again. Write  ad.Program(..., microbatch={max(1, largest // 2)})."
        ) from error
    why = str(error).partition("\n")[0].rstrip(".")
    if not ctx.kernels.splittable and largest > ctx.step_plan.plan.multiple:
        if ctx.world.processes == 1:
            raise LocalBatchTooLarge(largest // 2) from error
        raise OutOfMemoryError(
            f"memory ran out in a local batch of {largest} examples, and this driver's batches cannot be split: "
            f"{ctx.step_plan.plan.unsplittable[0]}. Write  ad.Program(..., max_local_batch={largest // 2})."
        ) from error
    if not ctx.kernels.halve(largest, why, [sum(of_worker) for of_worker in microbatches]):
        raise no_smaller_one(largest, why) from error


def _check_state(ctx: StepContext, error: Exception) -> None:
    """Raise an OutOfMemoryError if the state is not valid: on accelerators an update may fail after its step."""
    workers = ctx.workers
    for leaf in jax.tree.leaves((workers.local_states, workers.local_op_states)):
        try:
            leaf.block_until_ready()
        except (RuntimeError, jax.errors.JaxRuntimeError):
            raise failed_update(error) from error


def check_update(error: Exception, what: str = "the update of the state") -> None:
    """Raise an OutOfMemoryError if a computation of the new state ran out of memory.

    Args:
      error: the computation's error.
      what: the computation, for the error.
    """
    if ran_out_of_memory(error):
        raise failed_update(error, what) from error


def failed_update(error: Exception, what: str = "the update of the state") -> OutOfMemoryError:
    """Return the error of a computation of the new state that ran out of memory.

    Args:
      what: the computation.
    """
    why = str(error).partition("\n")[0].rstrip(".")
    return OutOfMemoryError(
        f"memory ran out in {what}: {why}. It was given the memory of the old state, so the step cannot be taken "
        "again: restore a checkpoint. To need less memory, use a smaller local batch (max_local_batch=), an optimizer "
        "that holds less, or a device with more memory."
    )
