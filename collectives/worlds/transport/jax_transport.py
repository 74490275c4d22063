"""The transport of a `JaxWorld`: operations of the processes of `jax.distributed`, over a tree of TCP connections."""

from __future__ import annotations

import jax

from adaptive import DisagreementError, WorkerError
from collectives.worlds.base import Lifetime

from .tcp_tree import TCPTree, TCPTreeError
from .transport import FailureReported, Transport


class JaxTransport(Transport):
    """Performs the operations of one world. All worlds of a process share the tree, its lock and its threads."""

    advice = (
        "XLA runs the collectives of a process in one order. Run one program after another, or start the job under "
        "MPI, where each thread's program can have a world of its own."
    )

    def __init__(self, lifetime: Lifetime, tree: TCPTree):
        super().__init__(lifetime, tree.lock, tree.threads)
        self.comm, self.sum = tree, tree.sum
        self.rank, self.processes = tree.rank, tree.processes

    def translate_error(self, error: BaseException) -> None:
        """Raise a WorkerError in place of an error of the tree or of XLA. Closes the tree if other processes may still
        be in the operation.
        """
        if self.inside and not isinstance(error, FailureReported | WorkerError | DisagreementError):
            self.comm.close(f"rank {self.rank} has left a collective before its end, by {type(error).__name__}")
        # XLA raises a ValueError for a program that runs in the calling thread, as small ones on CPUs do.
        of_gloo = isinstance(error, ValueError) and "Gloo" in str(error)
        if of_gloo or isinstance(error, TCPTreeError | jax.errors.JaxRuntimeError):
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            where = f" in {self.operation.about}" if self.operation.about else ""
            raise WorkerError(
                f"rank {self.rank} of {self.processes} lost the connection to the others{where}: {said}. Most likely "
                "another rank has failed: see its output."
            ) from error
