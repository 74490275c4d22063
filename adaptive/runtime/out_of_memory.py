"""The errors that follow when memory runs out in a step: they say which size to write instead."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from adaptive.base.errors import OutOfMemoryError

from .kernels.memory_bound import no_smaller_one, ran_out_of_memory
from .microbatches import Microbatches
from .step_plan import StepContext


def check_memory(ctx: StepContext, error: jax.errors.JaxRuntimeError, microbatches: Sequence[Microbatches]) -> None:
    """Raise an OutOfMemoryError with advice if memory ran out in a step's kernels.

    Args:
      error: the step's error.
      microbatches: those of the step, by local index.
    """
    if not ran_out_of_memory(error):
        return
    for leaf in jax.tree.leaves([values[: len(ctx.workers.places)] for values in ctx.workers.values]):
        try:
            leaf.block_until_ready()
        except (RuntimeError, jax.errors.JaxRuntimeError):  # on accelerators an update may fail after its step
            raise failed_update(error) from error
    largest = max((size for of_worker in microbatches for size in of_worker), default=1)
    why = str(error).partition("\n")[0].rstrip(".")
    if largest == 1:
        raise no_smaller_one(largest, why) from error
    smaller = f"{'microbatch' if ctx.kernels.splittable else 'max_local_batch'}={largest // 2}"
    auto = "" if ctx.kernels.memory is not None else ', or max_local_batch="auto", a bound by what XLA reports'
    raise OutOfMemoryError(
        f"memory ran out in a microbatch of {largest} examples: {why}. Write  ad.Program(..., {smaller}){auto}. "
        "The state is that of the step before."
    ) from error


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
