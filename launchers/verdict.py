"""Whether a job ended well, from what its processes said."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Process:
    """What a process has said of itself, and whether it is still there."""

    job: str
    rank: int
    size: int  # of its job: those that mpirun started, or that were spawned together
    host: str
    pid: int
    connected: bool = True
    worlds: int = 0  # that it is in
    ended: int | None = None  # its exit code, once it is known
    heard: bool = False  # it ended by an error that it has heard of from another
    left: bool = False  # for good, while others went on

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"

    @property
    def crashed(self) -> bool:
        """It died where nobody took over what it did: outside a world."""
        return not self.connected and self.ended is None and not self.left and self.worlds == 0


def verdict(processes: Iterable[Process], own: int | None) -> int:
    """The job's exit code.

    What ended badly decides: the code of the first that did, and not because of another. Processes that died inside a
    world, and those that left, count for nothing if another ended well. Where no process said anything, the launcher's
    own code counts.

    Args:
      processes: in the order in which they ended.
      own: the exit code of the MPI's launcher; `None` where it had to be ended.
    """
    stayed = [process for process in processes if not process.left]
    bad = [process for process in stayed if process.ended]
    if bad:
        return min(bad, key=lambda process: process.heard).ended or 1  # of the first that had an error of its own
    well = any(process.ended == 0 for process in stayed)
    if well and not any(process.crashed for process in stayed):
        return 0
    if not stayed and own is not None:
        return own
    return own or 1
