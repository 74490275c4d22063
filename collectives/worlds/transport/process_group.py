"""The processes of a job, and groups of them that communicate."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Process(NamedTuple):
    """One process of a job."""

    worker_slots: range  # its worker slots
    node: str  # the name of its host, for messages
    host: int  # number of its host: processes with the same number share memory and see each other's pids
    pid: int

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.node}"


@dataclass(frozen=True)
class ProcessGroup:
    """Processes that communicate with each other, by rank.

    Attributes:
      comm: their communicator. Errors raise exceptions.
    """

    comm: Any
    everyone: tuple[Process, ...]

    @property
    def one_host(self) -> bool:
        """Whether all processes are on one host."""
        return len({process.host for process in self.everyone}) == 1

    def lost_in(self, later: ProcessGroup) -> dict[int, Process]:
        """Return the processes that a later group lacks, by their ranks in this group."""
        return {rank: p for rank, p in enumerate(self.everyone) if p not in later.everyone}

    def subgroup(self, comm: Any) -> ProcessGroup:
        """Return the group of the processes in `comm`, a communicator of some of these processes."""
        ranks = range(comm.size)
        before = comm.group.Translate_ranks(list(ranks), self.comm.group)
        return ProcessGroup(comm, tuple(self.everyone[rank] for rank in before))


def all_processes(comm: Any, host: Any, n_devices: int) -> tuple[Process, ...]:
    """Return all processes of a communicator, by rank. Communicates.

    `host`: the communicator of this host's processes. `n_devices`: of this process, with one worker on each.
    """
    number = host.bcast(comm.rank)
    return as_processes(comm.allgather((n_devices, platform.node(), number, os.getpid())))


def as_processes(facts: Iterable[tuple[int, str, int, int]]) -> tuple[Process, ...]:
    """Return the processes with these numbers of devices, names and numbers of hosts, and pids, by rank."""
    found, first = [], 0
    for count, node, host, pid in facts:
        found.append(Process(range(first, first + count), node, host, pid))
        first += count
    return tuple(found)
