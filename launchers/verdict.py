"""What follows from how the processes of a job end: whether the job has to be ended, and its exit code."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(eq=False)
class Process:
    """What is known of a process, from itself and from its supervisor.

    Attributes:
      job: the name of the job in the MPI's launcher: those that are spawned are another one.
      size: how many processes that job has.
      is_command: it is of a command, of which any part may report.
      spawned: by others of the job, whose training does not depend on it before it has `joined`.
      connected: whether it runs, as far as is known.
      worlds: how many worlds it is in.
      worked: whether it has been in one.
      making: whether it makes a world of all processes of its job.
      ended: the exit code, once it is known.
      killed: the signal that ended it, if that is known.
      heard: it ended by an error that it has heard of from another.
      left: it ended for good, while others go on.
      cut_short: it went on when the MPI's launcher ended, or was ended.
    """

    job: str
    rank: int
    size: int
    host: str
    pid: int
    spawned: bool = False
    is_command: bool = False
    joined: bool = False
    connected: bool = True
    worlds: int = 0
    worked: bool = False
    making: bool = False
    ended: int | None = None
    killed: int | None = None
    heard: bool = False
    left: bool = False
    cut_short: bool = False

    def __str__(self) -> str:
        spawned = " of a spawned job" if self.spawned else ""
        return f"rank {self.rank}{spawned} (pid {self.pid} on {self.host})"

    @property
    def counts(self) -> bool:
        """Whether the job depends on how it ends."""
        return not self.left and (self.joined or not self.spawned)

    @property
    def crashed(self) -> bool:
        """Whether it died where nobody takes over its work: outside a world."""
        dead = not self.connected and self.ended is None and not self.left
        return dead and (self.cut_short or self.worlds == 0)

    @property
    def over(self) -> bool:
        """Whether nothing more comes of it."""
        return not self.connected or self.ended is not None or self.left

    @property
    def where(self) -> str:
        """Where it was when it ended, in words."""
        if self.spawned and not self.joined:
            return "before it joined"
        return "in a world" if self.worlds else "after its last world" if self.worked else "before its first world"

    @property
    def how(self) -> str:
        """How it ended, in words."""
        if self.ended is not None:
            return f"ended with exit code {self.ended}"
        return "died" if self.killed is None else f"was killed by {_name(self.killed)}"


def verdict(processes: Sequence[Process], own: int | None) -> int:
    """Return the job's exit code.

    The first process that ended badly decides, unless it did so because of another one: by its exit code, or by 128 +
    the signal that killed it outside a world. A process that died inside a world, left, or was spawned and had not
    joined, counts for nothing if another one ended well. The code of the MPI's launcher counts only where no process
    has reported anything.

    Args:
      processes: in the order in which they ended.
      own: the exit code of the MPI's launcher; `None` where it had to be ended.
    """
    counted = [process for process in processes if process.counts]
    first = _first_bad(counted)
    if first is not None:
        return _code(first, own)
    if any(process.ended == 0 for process in counted):
        return 0
    lost = [process for process in counted if process.killed is not None]
    if lost:
        return _code(lost[-1], own)
    return own if own is not None and not counted else own or 1


def reason_to_end(processes: Collection[Process]) -> str | None:
    """Return why the job has to be ended soon: a sentence, or "" where nothing has to be said. None: it goes on.

    Args:
      processes: in the order in which they ended, and then those that go on.
    """
    counted = [process for process in processes if process.counts]
    first = _first_bad([process for process in counted if process.ended or not process.worked])
    if first is not None and first.ended:
        return "" if first.heard else f"{first} {first.how}."
    if first is not None:
        return f"{first} {first.how} {first.where}, and the others cannot go on without it."
    for process in processes:
        if process.over and process.worlds == 0 and (waiting := _waiting(counted, process)):
            return f"{process} {process.how} {process.where}, and {waiting} waits for it in comm.world()."
    return "" if all(process.over for process in counted) and _all_were_there(processes) else None


def remark(process: Process) -> str:
    """Return what to say of a process that has died while the job goes on, or "" where a world says it."""
    if process.left or not process.over:
        return ""
    if not process.counts and process.ended != 0:
        return f"{process} {process.how} {process.where}; the others go on without it."
    if process.crashed and process.worked:
        return (
            f"{process} {process.how} {process.where}; the others go on, and the job ends with {_code(process, None)}."
        )
    return ""


def _first_bad(processes: Iterable[Process]) -> Process | None:
    """The first process that ended badly, and not because of another one, if there is such."""
    bad = (process for process in processes if process.ended or process.crashed)
    return min(bad, key=lambda process: process.heard, default=None)


def _waiting(processes: Iterable[Process], process: Process) -> Process | None:
    """Another process that makes a world, for which this one is needed."""
    others = (p for p in processes if p is not process and p.job == process.job)
    return next((other for other in others if other.making and not other.over), None)


def _all_were_there(processes: Collection[Process]) -> bool:
    """Whether all processes of the job have been heard of; else others may be on their way."""
    ranks = {(process.job, process.rank) for process in processes}
    return all((p.job, rank) in ranks for p in processes if p.counts for rank in range(p.size))


def _code(process: Process, own: int | None) -> int:
    if process.ended is not None:
        return process.ended
    return 128 + process.killed if process.killed is not None else own or 1


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
