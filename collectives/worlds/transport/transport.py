"""Base class of transports, which perform the operations of several processes, one thread at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from threading import Lock
from time import perf_counter
from typing import Any

from adaptive.base.failure import FAILURE_THREAD
from adaptive.base.source_lines import current_line
from collectives.worlds.lifetime import Lifetime

from .disagreement import Intent
from .operations import BARRIER, CLOSE, FAILURE, GatherBytes, Operation
from .preamble import Preamble

RECENT = 512  # operations whose ends are kept


class FailureReported(Exception):
    """Ends an operation that reports a failure, once the other processes have received the report."""


class Transport(ABC):
    """Performs the operations of a world of several processes, one after another.

    Args:
      lifetime: the world's lifetime.
      lock: held during an operation; shared by worlds with the same connections.
      threads: names of the threads that have used these connections, by thread identifier.

    Attributes:
      rank, processes: rank of this process and number of processes in the present group.
      preamble: the first collective of every operation.
      operation: the operation under way, or the latest one. A channel uses one object for all its messages.
      begun: number of operations that this process has begun.
      inside: whether this process is in an operation.
      survives: whether the others continue when processes are lost. Replicated.
      waited: seconds spent in preambles so far, that is, waiting for the last process. Local.
      ends: when the recent operations have ended, in seconds by `time.perf_counter`. Local.
    """

    survives = False
    rank: int
    processes: int

    def __init__(self, lifetime: Lifetime, lock: Any = None, threads: dict[int, str] | None = None):
        self.lifetime = lifetime
        self.lock = lock or Lock()
        self.threads = {} if threads is None else threads
        self.preamble = Preamble()
        self.operation = Operation("", "", 0)
        self.begun = 0
        self.inside = False
        self.waited = 0.0
        self.ends: deque[float] = deque(maxlen=RECENT)

    def collective(self) -> CollectiveLock:
        """Return a context manager for `perform`, which holds the lock and raises MPI's errors as WorkerErrors."""
        return CollectiveLock(self)

    def run(self, operation: Operation) -> None:
        """Perform one operation under the lock. Raises as `perform` does."""
        with self.collective():
            self.perform(operation)

    def mark_begun(self, operation: Operation) -> None:
        """Record for the watchdog that an operation is under way without `perform`."""
        self.operation, self.inside = operation, True
        self.begun += 1

    def all_gather_bytes(self, value: bytes, about: str = "", more: str = "") -> list[bytes]:
        """Return every process's `value`, by rank: see `World.all_gather_bytes`."""
        gather = GatherBytes(value, about, more)
        self.run(gather)
        return gather.result

    def barrier(self) -> None:
        """Return once every process has called it."""
        self.run(Operation("a barrier", "", BARRIER))

    def report_failure(self, why: str) -> None:
        """Make all other processes raise WorkerError in their current or next operation."""
        with suppress(FailureReported):
            self.run(Operation("", "", FAILURE, failure=why))

    def intent(self, operation: Operation, world: str = "") -> Intent:
        """Describe what this process is about to do, for the error after a disagreement."""
        names = [name for name in self.threads.values() if name != FAILURE_THREAD]
        leaves = self.lifetime.leaving or operation.kind == CLOSE
        what = operation.about, operation.text, operation.more, current_line(), operation.failure
        return Intent(*what, leaves, names, world)

    @abstractmethod
    def check_usable(self) -> None:
        """Raise unless the calling thread can begin an operation now. Called with the lock held."""

    @abstractmethod
    def perform(self, operation: Operation) -> None:
        """Complete an operation on all processes. Called with the lock held.

        Raises:
          WorkerError: another process has failed. On every process.
          DisagreementError: the processes are in different operations. On every process.
          MembersChanged: processes were lost, and the operation cannot simply be repeated. On every process.
        """

    @abstractmethod
    def translate_error(self, error: BaseException) -> None:
        """Raise a WorkerError in place of an error of MPI, XLA or TCP. Called with the lock held."""


class CollectiveLock:
    """The `with` block of `Transport.collective`. Not a generator, which costs more time in every message."""

    def __init__(self, transport: Transport):
        self._transport = transport

    def __enter__(self) -> None:
        self._transport.lifetime.check_open()  # before the lock, which another thread held at a fork
        self._transport.lock.acquire()
        try:
            self._transport.check_usable()
        except BaseException:
            self._transport.lock.release()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        transport = self._transport
        try:
            if error is not None:
                transport.translate_error(error)
        finally:
            transport.inside = False
            transport.ends.append(perf_counter())
            transport.lock.release()
