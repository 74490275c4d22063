"""The transport of an `MPIWorld`: operations over MPI, also after processes are lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from threading import current_thread
from time import perf_counter
from typing import Any

import numpy as np

from adaptive import CollectiveError, WorkerError
from adaptive.base.world import MembersChanged
from collectives.worlds.base import Lifetime

from .operations import Operation
from .process_group import Process, ProcessGroup
from .repair import all_agree, repair
from .transport import Transport

# Allreduce in pieces of this size where all ranks are on one host: a piece stays in the caches between the copy from
# the other rank, the sum and the copy back. ResNet-50's gradients between two ranks (medians, in ms): 23 in pieces
# of 64 kB, 18 of 128, 16.5 of 256, 15.4 of 512, 16.5 of 1024, 17.7 of 4096, 20 as whole tensors; with two to four in
# flight as Iallreduce, 1.2 to 1.3 times as long (benchmarks/exchange_resnet50.py).
PIECE_BYTES = 512 << 10
# Between hosts, where each piece costs the network's latency: the limit of 32-bit counts.
WHOLE_BYTES = 1 << 30


class MPITransport(Transport):
    """Performs the operations of a group of MPI processes, which shrinks when processes are lost.

    Args:
      mpi: the module `mpi4py.MPI`.
      survives: whether the others continue when processes are lost.

    Attributes:
      group: the processes that run operations now.
      ops: MPI's reductions, by name.
      piece_bytes: size of the pieces in which large parts are summed.
      on_lost: called by the next operation with that group, the lost processes by rank, and the operation and time.
      world_number: identifies the world among those of its processes. Replicated.
    """

    def __init__(self, mpi: Any, lifetime: Lifetime, *, survives: bool):
        super().__init__(lifetime)
        self.mpi, self.survives = mpi, survives
        self.ops = {"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN}
        self.on_lost: Callable[[ProcessGroup, Mapping[int, Process], tuple[str, float]], None]
        self.world_number = 0

    def set_group(self, group: ProcessGroup) -> None:
        """Perform operations in this group from now on. Local; called by all its processes at the same point."""
        self.group, self.comm = group, group.comm
        self.watch_over(group)
        self.rank, self.processes = self.comm.rank, self.comm.size
        self.sum = partial(self.comm.Allreduce, self.mpi.IN_PLACE)
        self.piece_bytes = PIECE_BYTES if group.one_host else WHOLE_BYTES

    def watch_over(self, group: ProcessGroup) -> None:
        """Have the watchdog watch these processes from now on."""
        if self.watchdog is not None:
            self.watchdog.watch(self.world_number, group.everyone, group.comm.rank)

    # --- losses ------------------------------------------------------------------------------------------------------

    def settle(self, operation: Operation, error: Exception | None) -> bool:
        """Agree whether all have completed an attempt, and repair the group if not: see `Transport.settle`."""
        if error is not None:
            with suppress(self.mpi.Exception):
                self.comm.Revoke()
        # Every failed attempt leads here, whatever the error, because the others may have completed the operation.
        if all_agree(self.mpi, self.comm, error is None):
            return True
        return self._repair(operation, error or self.mpi.Exception(self.mpi.ERR_PROC_FAILED))

    def _repair(self, operation: Operation, error: Exception) -> bool:
        """Create a communicator of the survivors, for the next attempt. All survivors call this, in this operation or
        in the next one. Returns whether this process has received the result from one that had completed the operation.
        """
        noticed = perf_counter()

        def level(comm: Any) -> tuple[bool, tuple[str, float]]:
            counts = np.zeros(comm.size, np.int64)
            comm.Allgather(np.asarray([self.completed], np.int64), counts)
            most = counts.max()
            behind = bool(self.completed < most)
            if counts.min() < most:
                (operation if behind else self.last).hand_on(comm, int(counts.argmax()))
            return behind, comm.bcast((operation.about or "a collective", perf_counter() - noticed))

        comm, (behind, how) = repair(self.mpi, self.comm, level)
        survivors = self.group.subgroup(comm)
        if len(survivors.everyone) == self.processes:
            raise error  # no process was lost
        self.survivors = survivors, how
        return behind

    def continue_with_survivors(self, operation: Operation) -> None:
        """Continue with the survivors, or raise MembersChanged: see `Transport.continue_with_survivors`."""
        (survivors, how), self.survivors = self.survivors, None
        self.on_lost(survivors, self.group.lost_in(survivors), how)
        if not operation.repeats:
            self.inside = False
            raise MembersChanged

    # --- threads and errors -------------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise unless the calling thread can begin an operation now.

        Raises:
          CollectiveError: the world is closed; or MPI does not allow the calling thread to use it.
          WorkerError: this process has left an operation before its end.
        """
        self.lifetime.check_open()
        if self.torn:
            raise WorkerError(
                f"rank {self.rank} left a collective by an error while the others were in it, so no further "
                "communication with them is possible."
            )
        if self.mpi.Query_thread() < self.mpi.THREAD_MULTIPLE and not self.mpi.Is_thread_main():
            raise CollectiveError(
                f"MPI was initialized for one thread at a time, and thread {current_thread().name!r} uses "
                f"{self.lifetime.world_name}. Do not set mpi4py.rc.thread_level: by default mpi4py requests "
                "MPI.THREAD_MULTIPLE."
            )
        super().check_usable()

    def translate_error(self, error: BaseException) -> None:
        """Raise a WorkerError in place of an error of MPI."""
        if isinstance(error, self.mpi.Exception):
            raise WorkerError(
                f"rank {self.rank} of {self.processes}: MPI failed ({error.Get_error_string()}). Most likely another "
                "rank has failed: see its error."
            ) from error
        self.torn = self.inside
