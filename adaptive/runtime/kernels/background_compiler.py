"""The background thread that compiles kernels, in order of urgency."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adaptive.base.values.ambient import current_settings

from .microbatches import Microbatches

if TYPE_CHECKING:
    from .compiled import CompiledKernels

QUIET_STEPS = 3  # undisturbed steps before each job, from which policies can learn speeds
_FIRST_PAUSE = 1.0  # maximum seconds of the first pause; later ones last at most as long as the job before
_TRIM_AFTER = (10.0, 60.0, 600.0)  # seconds after which freed memory is returned to the system


@dataclass(frozen=True)
class KernelJob:
    """Compile the kernels of one worker, by local index, for microbatches of `size` examples."""

    local_index: int
    size: int


@dataclass(frozen=True)
class StepJob:
    """Compile one program for whole steps with these microbatches of each worker."""

    microbatches: Microbatches


Job = KernelJob | StepJob


class BackgroundCompiler:
    """Compiles in one thread, so that the steps lose at most one core.

    Holds its owner weakly and ends with it. `close` does not wait for the thread. The end of the process waits for the
    current compile: a thread that returns from XLA to an interpreter that is shutting down would abort the process.

    Where compiling takes a large part of the process's cores, steps beside it do not measure the machine's speed. With
    `pauses` the thread lets some undisturbed steps pass before each job, but for no longer than the job before took, so
    all jobs take at most twice as long. There is no pause after a job during which no step ended, as in reserve.

    Args:
      owner: carries out the jobs.
      pauses: whether to let steps pass between two jobs.
    """

    def __init__(self, owner: CompiledKernels, *, pauses: bool = False):
        self.error: BaseException | None = None
        self._pauses, self._longest_pause = pauses, _FIRST_PAUSE
        self._beside_step = False  # whether the thread has compiled since the last step ended
        self._stepped = True  # whether a step has ended since the last job began
        self._quiet = 0  # undisturbed steps since the pause began
        self._in_a_hurry = self._ended = False
        self._waiting: dict[Job, tuple[int, int]] = {}  # jobs with their order
        self._at: Job | None = None
        # Its lock may be taken again by the thread that has it: the garbage collector may call `_end` anywhere.
        self._changed = threading.Condition()
        self._count = itertools.count()
        self._settings = current_settings()
        self._owner = weakref.ref(owner, self._end)
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether all jobs are done."""
        return not self.unfinished()

    def unfinished(self) -> list[Job]:
        """Return the jobs that wait, and the one that is being carried out."""
        with self._changed:
            return [*self._waiting, *([] if self._at is None else [self._at])]

    def put(self, job: Job, *, urgent: bool = False) -> None:
        """Add a job. Urgent ones are done first."""
        if self._ended:
            return
        with self._changed:
            order = (0 if urgent else 1, next(self._count))
            self._waiting[job] = min(order, self._waiting.get(job, order))
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="adaptive-compiler", daemon=True)
            atexit.register(self._end_and_wait)
            self._thread.start()

    def drop(self, job: Job) -> None:
        """Remove a job, unless it has begun."""
        with self._changed:
            self._waiting.pop(job, None)

    def step_ended(self) -> bool:
        """Record the end of a step. Returns whether something was compiled during it."""
        with self._changed:
            beside, self._beside_step = self._beside_step, self._at is not None
            self._stepped, self._quiet = True, 0 if beside else self._quiet + 1
            if self._quiet == QUIET_STEPS:
                self._changed.notify_all()
        return beside

    def finish(self) -> None:
        """Wait until all jobs are done, without pauses, or one has failed. No step may run meanwhile."""
        with self._changed:
            self._in_a_hurry = True
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self.error or not (self._waiting or self._at))
            finally:
                self._in_a_hurry, self._beside_step = False, self._at is not None  # it has disturbed no step

    def close(self) -> None:
        """End the thread after its current compile."""
        with self._changed:
            self._waiting.clear()
        self._end()

    def _end(self, _owner: object = None) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _end_and_wait(self) -> None:
        self.close()
        assert self._thread is not None, "registered with the thread"
        self._thread.join()

    def _next(self) -> Job | None:
        """Wait for a job, and return freed memory to the system meanwhile. Returns `None` if it was dropped, or at the
        end.
        """
        for seconds in (*_TRIM_AFTER, None):
            with self._changed:
                if self._changed.wait_for(lambda: self._waiting or self._ended, seconds):
                    break
            return_freed_memory()
        with self._changed:
            if self._pauses and self._stepped:
                self._quiet = 0
                self._changed.wait_for(self._may_go_on, self._longest_pause)
            self._at = None if self._ended else min(self._waiting, key=self._waiting.__getitem__, default=None)
            if self._at is not None:
                del self._waiting[self._at]
                self._beside_step, self._stepped = True, False
            return self._at

    def _may_go_on(self) -> bool:
        return self._quiet >= QUIET_STEPS or self._in_a_hurry or self._ended

    def _run(self) -> None:
        try:
            while not self._ended and self.error is None:
                self._carry_out(self._next())
        finally:
            atexit.unregister(self._end_and_wait)

    def _carry_out(self, job: Job | None) -> None:
        owner, began = self._owner(), time.monotonic()
        if job is None or owner is None:
            return
        try:
            with self._settings():
                owner.carry_out(job)
            self._longest_pause, self._at = time.monotonic() - began, None
        except BaseException as error:  # raised in the next step
            self.error = error
        finally:
            with self._changed:
                self._changed.notify_all()


def return_freed_memory() -> None:
    """Return free pages of the C library's heap to the system, if it is glibc's.

    By itself glibc returns only memory at the top of its heap. Arrays up to 32 MiB (`M_MMAP_THRESHOLD`, which adapts)
    are allocated on the heap, where one small object can keep hundreds of free MiB below it: memory of compilers, and
    of gradients of several microbatches. A call takes milliseconds, in which other threads may wait to allocate, and
    pages must be mapped again later. So it is not called in every step.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
