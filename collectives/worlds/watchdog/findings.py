"""Findings of a waiting rank about the other ranks, and reports of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from adaptive.base.source_lines import at
from adaptive.base.thread_status import IN_A_STEP

from .core_time import UNKNOWN_USE, CoreTime, CoreUse
from .stacks import ProcessId

_SHOWN = 8  # ranks with their stacks in a report; even a thousand ranks are mostly stuck in one place
_MOST = 40_000  # characters of a report


class RankState(Enum):
    """The state of a rank while others wait for it in an operation of their world."""

    HERE = "waits in it, too"
    COMPILES = "is compiling"
    AWAY = "is not in it, but"
    CROSSED = "is not in it, but in a collective of another world"
    SILENT = "does not answer"
    STOPPED = "is stopped"
    TRACED = "is held by a debugger"
    GONE = "no longer exists"
    ENDED = "has ended"
    CUT_OFF = "can no longer be reached"
    UNKNOWN = "cannot be asked"

    @property
    def well(self) -> bool:
        """Whether the rank will enter the operation, as far as is known."""
        return self in (RankState.HERE, RankState.COMPILES)

    @property
    def runs(self) -> bool:
        """Whether the rank's Python answers."""
        return self in (RankState.HERE, RankState.COMPILES, RankState.AWAY, RankState.CROSSED)


@dataclass(frozen=True)
class RankFinding:
    """The state of one rank, as another rank has found it.

    Attributes:
      rank: the rank.
      process: its process.
      state: its state.
      doing: description of its activity.
      line: the line of the user's file at which it is.
      seconds: seconds since its last collective; None if the rank did not answer.
      stack: its Python stack, or "".
      core_time: the kernel's account of its process, if available.
      core_use: its use of cores between the last two accounts.
    """

    rank: int
    process: ProcessId
    state: RankState
    doing: str = ""
    line: str = ""
    seconds: float | None = None
    stack: str = ""
    core_time: CoreTime | None = None
    core_use: CoreUse = UNKNOWN_USE

    @property
    def does_nothing(self) -> bool:
        """Whether the rank is stopped, or in a step and asleep. Then it does not do anything that takes long."""
        return self.state is RankState.STOPPED or (
            self.state is RankState.AWAY and self.doing == IN_A_STEP and self.core_use.sleeps
        )

    def __str__(self) -> str:
        who = f"rank {self.rank} ({self.process.host}, pid {self.process.pid})"
        since = "" if self.seconds is None else f"; it has been in no collective for {_seconds(self.seconds)}"
        match self.state:
            case RankState.AWAY:
                text = f"is {self.doing}{at(self.line)}{since}"
            case RankState.COMPILES:
                text = f"is {self.doing}{at(self.line)}{since}. Compiling is not limited"
            case RankState.CROSSED:
                text = f"is in a collective of another world{at(self.line)}{since}"
            case RankState.SILENT:
                text = "runs, but its Python does not answer: C code holds the GIL" + (
                    "" if self.stack else ", or Python has ended"
                )
            case RankState.STOPPED:
                text = f"is stopped (SIGSTOP or Ctrl-Z); `kill -CONT {self.process.pid}` there resumes it"
            case RankState.ENDED:
                text = f"has ended: {self.doing}"
            case RankState.CUT_OFF:
                text = "does not answer, nor does any other rank of its host: the rank, the host or the network hangs"
            case RankState.UNKNOWN:
                text = f"cannot be asked: UDP does not reach {self.process.host} from here. It does not count as stuck"
            case _:
                text = self.state.value
        if self.core_use.waits:
            wait, span = _seconds(self.core_use.wait), _seconds(self.core_use.seconds)
            text += f". It waited for a core for {wait} of the last {span}, which does not count"
        stack = "".join(f"\n        {row}" for row in self.stack.splitlines())
        return f"    {who} {text}.{stack}"


def report(rank: int, about: str, line: str, waited: float, findings: Sequence[RankFinding], rest: str) -> str:
    """Return the text of a report about a hang, which is logged once.

    Args:
      rank: the rank that waits.
      about: the operation in which it waits.
      line: the line of the user's file that called the operation.
      waited: seconds that it has waited.
      findings: the findings about all other ranks.
      rest: the last sentence: the consequences.
    """
    missing = [finding for finding in findings if finding.state is not RankState.HERE]
    more = [f"    and {len(missing) - _SHOWN} more ranks are not in it"] if len(missing) > _SHOWN else []
    head = f"rank {rank} has waited for {_seconds(waited)} in {about}{at(line)}:"
    body = "\n".join([head, *map(str, missing[:_SHOWN])])
    return "\n".join([body[:_MOST], *more, rest])


def given_up_message(about: str, waited: float, hang_timeout: float) -> str:
    """Return the last message of a rank that the others have declared lost.

    Args:
      about: the operation in which they waited.
      waited: seconds that they waited.
      hang_timeout: the setting, in seconds.
    """
    return (
        f"The other ranks have declared this process lost: they waited for it for {_seconds(waited)} in {about}, and "
        "it did not answer. It or its host may have been stopped. The job has ended, so this process ends too. "
        f"hang_timeout= of comm.world() sets how long the others wait ({hang_timeout:g} s)."
    )


def rank_names(ranks: Iterable[int]) -> str:
    """Describe ranks: `rank 1`, or `ranks 1, 2`."""
    numbers = sorted(ranks)
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
