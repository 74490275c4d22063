"""The verdict on a job from the ends of its processes: whether the job has to be ended, and its exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_MOST_NAMED = 8  # dead processes in one message
_SIGNALS = {number.value: number.name for number in signal.Signals}


@dataclass(eq=False)
class ProcessState:
    """The state of one process, as reported by itself and by its supervisor."""

    job: str  # name of the job in mpirun; spawned processes have another one
    rank: int  # in that job
    size: int  # its number of processes
    host: str
    pid: int  # on its host
    spawned: bool = False  # other processes of the job started it; training depends on it once it has `joined`
    is_command: bool = False  # it is part of a command, several processes of which may report
    joined: bool = False  # it was spawned and has become a member
    connected: bool = True  # it is running, as far as is known
    worlds: int = 0  # number of worlds that it is in now
    worked: bool = False  # it has been in a world
    making: bool = False  # it is making a world of all processes of its job
    ended: int | None = None  # exit code; None until it is known
    killed: int | None = None  # signal that ended it; None if there was none, or it is unknown
    heard: bool = False  # it ended by an error that every process raises
    left: bool = False  # it left for good while the others continue
    cut_short: bool = False  # it was still running when mpirun ended

    def update(self, said: Mapping[str, Any]) -> None:
        """Record a report; `ending.py` lists the fields."""
        for name in ("pid", "worlds", "making", "joined", "left", "killed"):
            setattr(self, name, said.get(name, getattr(self, name)))
        self.worked |= self.worlds > 0
        if "ends" in said and self.is_command:
            self.worlds = 0  # the command may go on
        elif self.ended is None and "ends" in said:
            self.ended, self.heard = said["ends"], said.get("heard", False)
        elif self.ended is None and (said.get("exited") or ("exited" in said and not self.worlds)):
            self.ended = said["exited"]
        self.connected &= not said.keys() & {"killed", "exited"}

    def __str__(self) -> str:
        spawned = " of a spawned job" if self.spawned else ""
        return f"rank {self.rank}{spawned} (pid {self.pid} on {self.host})"

    @property
    def counts(self) -> bool:
        """Whether the job's exit code depends on how this process ends."""
        return not self.left and (self.joined or not self.spawned)

    @property
    def crashed(self) -> bool:
        """Whether the process died outside a world, where no other process takes over its work."""
        dead = not self.connected and self.ended is None and not self.left
        return dead and (self.cut_short or self.worlds == 0)

    @property
    def over(self) -> bool:
        """Whether it has ended, left, or lost its connection."""
        return not self.connected or self.ended is not None or self.left

    @property
    def where(self) -> str:
        """Phrase for the phase in which the process ended."""
        if self.spawned and not self.joined:
            return "before it joined"
        return "in a world" if self.worlds else "after its last world" if self.worked else "before its first world"

    @property
    def how(self) -> str:
        """Phrase for the way in which the process ended."""
        if self.ended is not None:
            return f"ended with exit code {self.ended}"
        name = _SIGNALS.get(self.killed or 0, f"signal {self.killed}")
        return "died" if self.killed is None else f"was killed by {name}"


def verdict(processes: Sequence[ProcessState], own: int) -> int:
    """Return the job's exit code, given all processes in the order of their ends, and `own`, that of mpirun.

    The first process that failed by its own error decides: by its exit code, or by 128 + the signal that killed it
    outside a world. Processes that died inside a world, left, or were spawned and had not joined are ignored if another
    process succeeded. The code of mpirun is used only if no process has reported anything.
    """
    counted = [process for process in processes if process.counts]
    if (first := _first_bad(counted)) is not None:
        return _code(first, own)
    if any(process.ended == 0 for process in counted):
        return 0
    if lost := [process for process in counted if process.killed is not None]:
        return _code(lost[-1], own)
    return own or int(bool(counted))


def reason_to_end(processes: Collection[ProcessState]) -> str | None:
    """Return why the job has to be ended: a sentence, or "" if none is needed. None if the job continues.

    Args:
      processes: the ended processes in the order of their ends, then the running ones.
    """
    counted = [process for process in processes if process.counts]
    first = _first_bad([process for process in counted if process.ended or not process.worked])
    lost = _losses(counted)
    if first is not None and first.ended and first.heard:
        return f"{lost}; the others ended by an error." if lost else ""
    if first is not None and first.ended:
        # Others that ended well before their first world may be why the making of a world has failed.
        early = (p for p in counted[: counted.index(first)] if p.ended == 0 and not (p.worked or first.worked))
        return f"{first} {first.how}." + "".join(f" Before that, {p} {p.how} {p.where}." for p in early)
    if first is not None:
        return f"{first} {first.how} {first.where}, and the others cannot continue without it."
    for process in (process for process in processes if process.over and process.worlds == 0):
        for other in counted:
            if other.job == process.job and other.making and not other.over:
                return f"{process} {process.how} {process.where}, and {other} waits for it in comm.world()."
    there = {(process.job, process.rank) for process in processes}  # the missing ones may still be starting
    if any(not p.over or any((p.job, rank) not in there for rank in range(p.size)) for p in counted):
        return None
    return f"no rank is left: {lost}." if lost and not any(process.ended == 0 for process in counted) else ""


def remark(process: ProcessState) -> str:
    """Return the message about a process that has died while the job continues; "" if its world reports the loss."""
    if process.left or process.cut_short or not process.over:
        return ""
    if not process.counts and process.ended != 0:
        return f"{process} {process.how} {process.where}; the others continue without it."
    if process.crashed and process.worked:
        return (
            f"{process} {process.how} {process.where}; the others continue, and the job ends with {_code(process, 0)}."
        )
    return ""


def _first_bad(processes: Iterable[ProcessState]) -> ProcessState | None:
    """Return the first process that failed; one that failed by its own error is preferred. None if none failed."""
    bad = (process for process in processes if process.ended or process.crashed)
    return min(bad, key=lambda process: process.heard, default=None)


def _losses(processes: Iterable[ProcessState]) -> str:
    """Return how processes died, in the order of their ends; "" if none did."""
    dead = [p for p in processes if p.over and p.ended is None and not (p.left or p.cut_short)]
    named = [f"{p} {p.how} {p.where}" for p in dead[:_MOST_NAMED]]
    more = [f"{len(dead) - _MOST_NAMED} more died"] if len(dead) > _MOST_NAMED else []
    return "; ".join([*named, *more])


def _code(process: ProcessState, own: int) -> int:
    if process.ended is not None:
        return process.ended
    return 128 + process.killed if process.killed is not None else own or 1


def say(text: str, by: str = "adaptive run: ") -> None:
    """Print a line of the launcher. Nobody may read it any more, and the job goes on, or is ended, all the same."""
    with suppress(OSError):
        sys.stderr.write(f"{by}{text}\n")
        sys.stderr.flush()
