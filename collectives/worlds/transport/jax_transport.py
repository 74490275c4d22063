"""The transport of a `JaxWorld`: operations of the processes of `jax.distributed`, over a tree of TCP connections."""

from __future__ import annotations

from threading import current_thread, get_ident
from time import perf_counter
from typing import TYPE_CHECKING
from zlib import crc32

import jax

from adaptive import DisagreementError, WorkerError
from adaptive.base.thread_status import thread_status
from collectives.worlds.lifetime import Lifetime

from .disagreement import Intent, disagreement_error
from .operations import Operation
from .tcp_tree import TCPTree, TCPTreeError
from .transport import FailureReported, Transport

if TYPE_CHECKING:
    from collectives.worlds.watchdog.watchdog import Watchdog

_ONE_AT_A_TIME = (
    "XLA runs the collectives of a process in one order. Run one program after another, or start the job under MPI, "
    "where each thread's program can have a world of its own."
)


class JaxTransport(Transport):
    """Performs the operations of one world. All worlds of a process share the tree, its lock and its threads.

    Attributes:
      world: the name of the world, the same on all processes.
      tree: the connections.
      watchdog: detects stuck ranks; None if hang_timeout is 0.
    """

    def __init__(self, lifetime: Lifetime, tree: TCPTree):
        super().__init__(lifetime, tree.lock, tree.threads)
        self.tree, self.world = tree, ""
        self.rank, self.processes = tree.rank, tree.processes
        self.preamble.set_processes(self.processes)
        self.watchdog: Watchdog | None = None

    @thread_status("in a collective", exchanges=True)
    def perform(self, operation: Operation) -> None:
        """Compare the processes' operations in the preamble, and carry the operation out if they are equal: see
        `Transport.perform`.
        """
        self.preamble.announce(crc32(f"{self.world}: {operation.about}".encode(), operation.kind))
        self.mark_begun(operation)
        came = perf_counter()
        try:
            self.tree.sum(self.preamble.numbers)
        finally:  # also if a process did not come
            self.waited += perf_counter() - came
        if self.preamble.heard() == self.preamble.expected:
            operation.carry_out(self.tree)
            return
        everyone: list[Intent] = self.tree.allgather(self.intent(operation, self.world))
        self.inside = False
        # A process that leaves takes part in no later operation.
        self.lifetime.closed = any(intent.leaves and intent.world == self.world for intent in everyone)
        if self.lifetime.closed and self.watchdog is not None:
            self.watchdog.close()
        raise FailureReported if operation.failure else disagreement_error(everyone, self.rank, _ONE_AT_A_TIME)

    def check_usable(self) -> None:
        """Raise unless the calling thread can begin an operation now.

        Raises:
          CollectiveError: the world is closed.
          WorkerError: a connection of the tree is closed.
        """
        self.lifetime.check_open()
        try:
            self.tree.check_open()
        except TCPTreeError as closed:
            raise WorkerError(f"rank {self.rank} is disconnected from the other ranks: {closed}.") from None
        self.threads.setdefault(get_ident(), current_thread().name)

    def translate_error(self, error: BaseException) -> None:
        """Raise a WorkerError in place of an error of the tree or of XLA; close the tree if other processes may still
        be in the operation.

        Raises:
          WorkerError: `error` is one of these.
        """
        if self.inside and not isinstance(error, FailureReported | WorkerError | DisagreementError):
            self.tree.close(f"rank {self.rank} has left a collective before its end, by {type(error).__name__}")
        if isinstance(error, TCPTreeError | jax.errors.JaxRuntimeError):
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            where = f" in {self.operation.about}" if self.operation.about else ""
            raise WorkerError(
                f"rank {self.rank} of {self.processes} lost the connection to the others{where}: {said}. Most likely "
                "another rank has failed: see its output."
            ) from error
