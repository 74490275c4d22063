"""The processes of a job: who they are, and which of them do things together."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Process(NamedTuple):
    """One process of a job."""

    seats: range  # of the workers that it carries
    node: str  # the name of its machine, for people
    host: int  # a number of its host: processes with the same number share memory, and see each other's pids
    pid: int

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.node}"


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that communicate with each other, by rank.

    Attributes:
      comm: their communicator, whose errors become exceptions.
    """

    comm: Any
    everyone: tuple[Process, ...]

    @property
    def one_host(self) -> bool:
        """Whether all share memory."""
        return len({process.host for process in self.everyone}) == 1

    def gone(self, later: ProcessGroup) -> dict[int, Process]:
        """By their ranks, the processes that are not among those who are together later."""
        return {rank: p for rank, p in enumerate(self.everyone) if p not in later.everyone}

    def over(self, comm: Any) -> ProcessGroup:
        """Those of them that a communicator joins, in its order."""
        ranks = range(comm.size)
        before = comm.group.Translate_ranks(list(ranks), self.comm.group)
        return ProcessGroup(comm, tuple(self.everyone[rank] for rank in before))


def all_processes(comm: Any, host: Any, n_devices: int) -> tuple[Process, ...]:
    """Who all processes are, by rank. Communicates.

    Args:
      host: the communicator of those on this process's host.
      n_devices: of this process: it carries a worker on each.
    """
    number = host.bcast(comm.rank)
    told: Sequence[tuple[int, str, int, int]] = comm.allgather((n_devices, platform.node(), number, os.getpid()))
    found, first = [], 0
    for count, node, its_host, pid in told:
        found.append(Process(range(first, first + count), node, its_host, pid))
        first += count
    return tuple(found)
