"""Base class of transports, which perform the operations of several processes, one thread at a time.

MPI and TCP match collectives only by their order: processes in different collectives receive each other's data, or wait
forever. Each operation therefore begins with the *preamble*: a sum of `NUMBERS` float64s over all processes, which is
the same collective for all operations. In it, each process contributes the number x of the operation that it is about
to do, and x². If for p processes

    sum x = p x_own    and    sum x^2 = p x_own^2

then the variance of x is 0, so all numbers are equal; and if one process finds this, all do. Applied to 16 bits at a
time, these sums are exact for up to a million processes. The rest of the numbers is room for small messages, which then
need no collective of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from struct import Struct
from threading import Lock, current_thread, get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn
from zlib import crc32

from adaptive.base.process.failure import FAILURE_THREAD
from adaptive.base.process.source_lines import current_line
from adaptive.base.process.thread_status import thread_status
from collectives.worlds.base import Lifetime
from launchers.activity import INSIDE, OUTSIDE, PATIENT, WorldActivity

from .disagreement import ONE_WORLD_EACH, Intent, disagreement_error
from .operations import BARRIER, CLOSE, FAILURE, GatherBytes, Operation

if TYPE_CHECKING:
    from collectives.worlds.watchdog import Watchdog

_HEADER = Struct("=4d")  # sums of x and x², for the higher and the lower 16 bits
announce, announced = _HEADER.pack_into, _HEADER.unpack_from


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
      comm: performs the collectives of an operation.
      sum: sums an array of float64s over all processes, in place.
      world: name of the world, the same on all processes; "" if it has connections of its own.
      operation: the operation under way, or the latest one. A channel uses one object for all its messages.
      completed: number of operations completed in the present group.
      last: the latest completed operation; its result is kept for processes that have not received it.
      inside: whether this process is in an operation.
      torn: whether this process has left an operation that other processes are still in.
      survives: whether the others continue when processes are lost. Replicated.
      survivors: after a loss, the group for the next operation, and the operation and time of the loss; else None.
      waited: seconds spent in preambles so far, that is, waiting for the last process. Local.
      activity: shows other processes what this one is doing.
      watchdog: has stuck ranks detected; None if hang_timeout is 0.
    """

    survives = torn = inside = False
    rank: int
    processes: int
    comm: Any
    sum: Callable[[Any], object]
    world = ""
    advice = ONE_WORLD_EACH  # the remedy if several threads share a world

    def __init__(self, lifetime: Lifetime, lock: Any = None, threads: dict[int, str] | None = None):
        self.lifetime = lifetime
        self.lock = lock or Lock()
        self.threads = {} if threads is None else threads
        self.operation = self.last = Operation("", "", 0)
        self.completed = 0
        self.survivors: Any = None
        self.waited = 0.0
        self.activity = WorldActivity()
        self.watchdog: Watchdog | None = None

    @thread_status("in a collective", exchanges=True)
    def run(self, operation: Operation) -> None:
        """Complete an operation on all processes that survive it: see `operations.py`. Inlines `collective`, because
        every message calls it.

        Raises:
          CollectiveError: the world is closed, or the calling thread cannot use it.
          WorkerError: another process has failed. On every process.
          DisagreementError: the processes are in different operations. On every process.
          MembersChanged: processes were lost, and the operation cannot simply be repeated. On every process.
        """
        if self.lifetime.closed:  # before the lock, which another thread held at a fork
            self.lifetime.check_open()
        self.lock.acquire()
        try:
            if self.torn or get_ident() not in self.threads:
                self.check_usable()
            try:
                header, completed, activity = operation.header, False, self.activity
                phase = PATIENT if operation.kind == CLOSE else INSIDE
                number = crc32(operation.about.encode(), operation.kind ^ crc32(self.world.encode()))
                high, low = float(number >> 16), float(number & 0xFFFF)
                while not completed:
                    if self.survivors is not None:
                        self.continue_with_survivors(operation)
                    p, operation.intents, error = self.processes, None, None
                    announce(header, 0, high, high * high, low, low * low)
                    self.operation = operation
                    self.inside = True
                    try:
                        came = perf_counter()
                        activity.begin(operation.about, came, phase)
                        try:
                            self.sum(operation.numbers)
                        finally:  # also if a process did not come
                            self.waited += perf_counter() - came
                        if announced(header) == (p * high, p * high * high, p * low, p * low * low):
                            operation.carry_out(self.comm)
                        else:
                            operation.rank = self.rank
                            operation.intents = self.comm.allgather(self.intent(operation))
                    except Exception as lost:  # not only MPI's: data from a process that died may not unpickle
                        error = lost
                    if error is not None and not self.survives:
                        raise error
                    unsettled = self.survives and operation.agreed and operation.intents is None
                    completed = (error is None and not unsettled) or self.settle(operation, error)
                self.completed += 1
                self.last = operation
                if operation.intents is not None:
                    self._raise_disagreement(operation.intents, operation)
            except BaseException as error:
                self.translate_error(error)
                raise
            finally:
                self.inside = False
                self.activity.phase = OUTSIDE
        finally:
            self.lock.release()

    @contextmanager
    def collective(self, operation: Operation) -> Iterator[None]:
        """Return a context manager for an operation that is carried out in its body, not by `run`: holds the lock, and
        raises MPI's errors as WorkerErrors.
        """
        self.lifetime.check_open()
        with self.lock:
            self.check_usable()
            self.operation, self.inside = operation, True
            self.activity.begin(operation.about, perf_counter())
            try:
                yield
            except BaseException as error:
                self.translate_error(error)
                raise
            finally:
                self.inside = False
                self.activity.phase = OUTSIDE

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

    def intent(self, operation: Operation) -> Intent:
        """Describe what this process is about to do, for the error after a disagreement."""
        names = [name for name in self.threads.values() if name != FAILURE_THREAD]
        leaves = self.lifetime.leaving or operation.kind == CLOSE
        what = operation.about, operation.text, operation.more, current_line(), operation.failure
        return Intent(*what, leaves, names, self.world)

    def _raise_disagreement(self, intents: list[Intent], operation: Operation) -> NoReturn:
        """Raise the error that describes what each process was about to do."""
        self.inside = False
        # A process that leaves takes part in no later operation.
        self.lifetime.closed = any(intent.leaves and intent.world == self.world for intent in intents)
        if self.lifetime.closed and self.watchdog is not None:
            self.watchdog.close()
        raise FailureReported if operation.failure else disagreement_error(intents, operation.rank, self.advice)

    def check_usable(self) -> None:
        """Raise CollectiveError unless the calling thread can begin an operation now. Called with the lock held."""
        self.lifetime.check_open()
        self.threads.setdefault(get_ident(), current_thread().name)

    def settle(self, operation: Operation, error: Exception | None) -> bool:
        """Agree with the other processes whether an attempt at an operation succeeded, since some may be lost.

        Returns whether the operation is completed; if not, `survivors` is set, and it must be performed again.

        Raises:
          Exception: `error` of this process's attempt, if no process was lost.
        """
        raise NotImplementedError  # of transports that do not survive losses

    def continue_with_survivors(self, operation: Operation) -> None:  # noqa: B027  (not all survive losses)
        """Continue with the survivors of a loss, all or raise MembersChanged."""

    @abstractmethod
    def translate_error(self, error: BaseException) -> None:
        """Raise a WorkerError in place of an error of MPI, XLA or TCP. Called with the lock held."""
