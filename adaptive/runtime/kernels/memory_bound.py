"""The largest microbatch that fits a device's memory, from what XLA reports of compiled kernels.

XLA reports the bytes of a compiled program's temporaries and results. A kernel fits if these, with a second set of
results (several microbatches are summed) and its examples, fit what was left when the first kernel was compiled. XLA
does not know of fragmentation, so a tenth is left free.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax

from adaptive.base.errors import OutOfMemoryError
from adaptive.base.process.host_memory import MemoryLeft

from .microbatches import Microbatches

if TYPE_CHECKING:
    from adaptive.runtime.step_context import StepContext

_USABLE = 0.9
_GIB = 1 << 30
_log = logging.getLogger("adaptive")

ADVICE = (
    'Memory ran out. With  ad.Program(..., max_local_batch="auto")  microbatches are as large as memory permits; '
    "microbatch= sets their size."
)


class MemoryBound:
    """Bounds the microbatches of this process's workers by memory. Local.

    Args:
      left: returns the bytes that are left for one worker. Called once, before the first kernel is judged.
      note: called with a sentence for the next report when the bound changes.

    Attributes:
      largest: the most examples in one microbatch, at least 1; `None` while no kernel was too large.
    """

    def __init__(self, left: Callable[[], float], note: Callable[[str], None]):
        self._find_left, self._note = left, note
        self.largest: int | None = None

    def allows(self, size: int) -> bool:
        """Return whether a kernel of `size` examples is worth compiling."""
        return self.largest is None or size <= self.largest

    def fits(self, nbytes: int) -> bool:
        """Return whether that much memory is left."""
        return nbytes <= self._left

    @cached_property
    def _left(self) -> float:
        return _USABLE * self._find_left()

    def admit(self, size: int, nbytes: int | None) -> bool:
        """Return whether a compiled kernel of `size` examples and `nbytes` may be used; if not, lower the bound."""
        if nbytes is None or size == 1 or self.fits(nbytes):
            return True
        # Part of the memory does not grow with the examples, so this is too large. Then the next kernel is judged.
        self._lower(
            max(1, min(int(size * self._left / nbytes), size - 1)),
            f"a kernel of {size} needs {nbytes / _GIB:.2f} GiB, and {self._left / _GIB:.2f} GiB are left",
        )
        return False

    def refuse(self, size: int, why: str) -> bool:
        """Lower the bound below `size` examples, which ran out of memory. Returns whether that is possible."""
        if size <= 1:
            return False
        self._lower(size // 2, f"{size} ran out of memory: {why}")
        return True

    def _lower(self, size: int, why: str) -> None:
        self.largest = 1 << (size.bit_length() - 1)
        text = f"this process runs at most {self.largest} examples in one microbatch: {why}."
        _log.warning("%s", text)
        self._note(text)

    @property
    def in_words(self) -> str:
        """The bound, for `explain`."""
        if self.largest is None:
            return "no kernel so far was too large (max_local_batch='auto')"
        return f"at most {self.largest} examples in one microbatch (max_local_batch='auto')"


def bytes_of(programs: Iterable[Any], batch_bytes: int) -> int | None:
    """Return the bytes that compiled programs need beyond the state and in addition to those of the examples; `None` if
    XLA does not report them.
    """
    found = _analyses(programs)
    if None in found:
        return None
    results = sum(analysis.output_size_in_bytes - analysis.alias_size_in_bytes for analysis in found)
    return max(analysis.temp_size_in_bytes for analysis in found) + 2 * results + batch_bytes


def temporary_bytes(programs: Iterable[Any]) -> int | None:
    """Return the bytes of the largest program's temporary arrays; `None` if XLA does not report them."""
    found = [analysis for analysis in _analyses(programs) if analysis is not None]
    return max((analysis.temp_size_in_bytes for analysis in found), default=None)


def _analyses(programs: Iterable[Any]) -> list[Any]:
    return [getattr(program, "memory_analysis", lambda: None)() for program in programs]


def bytes_left(devices: Sequence[jax.Device], processes: int) -> float:
    """Return the bytes that are left for one of this process's workers on these devices; infinite if unknown. The
    processes of a host share its main memory.
    """
    held = devices[0].memory_stats() or {}
    limit, used = held.get("bytes_limit"), held.get("bytes_in_use")
    if limit and used is not None:  # CUDA's own allocator (cuda_async) reports a limit of 0
        return (limit - used) / devices.count(devices[0])
    return MemoryLeft()() / (processes * len(devices)) if devices[0].platform == "cpu" else float("inf")


def no_smaller_one(size: int, why: str) -> OutOfMemoryError:
    """Return the error for a microbatch that runs out of memory and cannot be smaller."""
    return OutOfMemoryError(
        f"memory ran out in a microbatch of {size}, and there is no smaller one: {why}. The model is too large for "
        "this device."
    )


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of XLA says that memory could not be allocated.

    On CPUs a program that was dispatched to another thread fails with "INTERNAL: Error dispatching computation: Out of
    memory allocating … bytes"; on GPUs a compiler that tries programs out, with "NOT_FOUND: All configs failed", and
    RESOURCE_EXHAUSTED only in the lines below; CUDA's driver, with "CUDA_ERROR_OUT_OF_MEMORY: out of memory".
    """
    text = str(error)
    exhausted = "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
    return isinstance(error, jax.errors.JaxRuntimeError) and exhausted


# --- errors of steps --------------------------------------------------------------------------------------------------


def check_memory(ctx: StepContext, error: jax.errors.JaxRuntimeError, microbatches: Sequence[Microbatches]) -> None:
    """Raise an OutOfMemoryError with advice if a step's error says that memory ran out in its microbatches."""
    if not ran_out_of_memory(error):
        return
    for leaf in jax.tree.leaves([values[: len(ctx.workers.places)] for values in ctx.workers.values]):
        try:
            leaf.block_until_ready()
        except (RuntimeError, jax.errors.JaxRuntimeError):  # on accelerators an update may fail after its step
            check_update(error)
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
    """Raise an OutOfMemoryError if the error says that the computation of the new state ran out of memory."""
    if ran_out_of_memory(error):
        why = str(error).partition("\n")[0].rstrip(".")
        raise OutOfMemoryError(
            f"memory ran out in {what}: {why}. It was given the memory of the old state, so the step cannot be taken "
            "again: restore a checkpoint. To need less memory, use a smaller local batch (max_local_batch=), an "
            "optimizer that holds less, or a device with more memory."
        ) from error
