"""Sums over several hosts, of which each sends its ranks' sum once: within hosts, between them, and within again.

    within    the ranks of a host add up, in shared memory, at its *leader*, the first of them
    between   leaders sum over hosts
    within    each leader tells its host

So of h hosts, n bytes of each rank, a host sends and receives 2 (h - 1) / h · n bytes, however many ranks it has and in
whatever order they are numbered. In a flat Allreduce of four ranks on two hosts Open MPI sends as much where the ranks
of a host follow one another, and twice as much where they alternate. Hosts may have different numbers of ranks.

Each element is summed at one place of each host, so all of its ranks have the same bits; leaders have, as ranks have
behind any Allreduce.

With as many slices as a host has ranks, each summed between hosts by another of them (Reduce_scatter, Allreduce and
Allgather), ResNet-50's gradients took longer: 1.13 s between two hosts at 1 Gbit/s, two ranks each, where leaders took
0.98; and 254 ms where 120, on a link that is as fast as memory. Both on a busy machine of two cores.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from .repair import all_agree

# At 1 Gbit/s in pieces of 512 kB, 1, 2 and 4 MB, and as whole tensors: 1.00, 0.98, 0.98, 1.16 and 1.19 s for
# ResNet-50's gradients; on a link as fast as memory 127, 120, 147, 177 and 190 ms.
PIECE_BYTES = 1 << 20


class ByHosts:
    """A way to sum, of ranks on several hosts. Made by all of a communicator; communicates.

    Args:
      host: the number of this process's host.
      survives: whether others go on where a process is lost: then nobody is left waiting in here.

    Raises:
      Exception: MPI's. Where one process gets it, all do, and `comm` is revoked.
    """

    piece_bytes = PIECE_BYTES

    def __init__(self, mpi: Any, comm: Any, host: int, *, survives: bool):
        self._mpi = mpi
        error: Exception | None = None
        try:
            within = comm.Split(host, comm.rank)
            within.Set_errhandler(mpi.ERRORS_RETURN)
            self._leads = within.rank == 0
            between = comm.Split(0 if self._leads else mpi.UNDEFINED, comm.rank)
            if self._leads:
                between.Set_errhandler(mpi.ERRORS_RETURN)
        except mpi.Exception as failed:
            if not survives:
                raise
            error = failed
            with suppress(mpi.Exception):
                comm.Revoke()  # others may still be making theirs
        # Who has them would wait in them for whoever has not, and could not be told: so all have them, or nobody.
        if survives and not all_agree(mpi, comm, error is None):
            raise error or mpi.Exception(mpi.ERR_PROC_FAILED)
        self._within, self._between = within, between
        self._revoked = False

    def sum(self, source: np.ndarray | None, target: np.ndarray) -> None:
        """Sum `source` over all ranks into `target`, or `target` in place where there is no source."""
        here = self._within
        if self._leads:
            here.Reduce(self._mpi.IN_PLACE if source is None else source, target)
            self._between.Allreduce(self._mpi.IN_PLACE, target)
        else:
            here.Reduce(target if source is None else source, None)
        here.Bcast(target)

    def revoke(self) -> None:
        """Whoever waits in here is told that a process was lost, and nobody comes."""
        self._revoked = True
        for comm in self._comms():
            with suppress(self._mpi.Exception):
                comm.Revoke()

    def free(self) -> None:
        """Not used any more; by all."""
        if not self._revoked:
            for comm in self._comms():
                with suppress(self._mpi.Exception):
                    comm.Free()

    def _comms(self) -> list[Any]:
        return [self._within, *([self._between] if self._leads else [])]
