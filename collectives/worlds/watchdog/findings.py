"""What a rank that waits finds out about another one, and what is said about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from adaptive.extend import at

from .stacks import ProcessId

_SHOWN = 8  # ranks with their stacks; of a thousand that are stuck most are stuck in one place
_MOST = 40_000  # characters of a report


class RankState(Enum):
    """Where a rank is while others wait for it in an operation of their world."""

    HERE = "waits in it, too"
    COMPILES = "is compiling"
    AWAY = "is not in it, but"
    CROSSED = "is not in it, but in a collective of another world"
    SILENT = "does not answer"
    STOPPED = "is stopped"
    GONE = "is not there any more"
    ENDED = "has ended"
    CUT_OFF = "cannot be reached any more"
    UNKNOWN = "cannot be asked"

    @property
    def well(self) -> bool:
        """Whether it will come, as far as anybody knows."""
        return self in (RankState.HERE, RankState.COMPILES)

    @property
    def runs(self) -> bool:
        """Whether its Python answers."""
        return self in (RankState.HERE, RankState.COMPILES, RankState.AWAY, RankState.CROSSED)

    @property
    def over(self) -> bool:
        """Whether it is certain that it does not come."""
        return self in (RankState.GONE, RankState.ENDED)


@dataclass(frozen=True)
class RankFinding:
    """What was found out about one rank.

    Attributes:
      doing: in words.
      line: of the user's file.
      seconds: for how long it has been in no collective; None where only it could know.
      stack: of Python, or "".
    """

    rank: int
    process: ProcessId
    state: RankState
    doing: str = ""
    line: str = ""
    seconds: float | None = None
    stack: str = ""

    def __str__(self) -> str:
        who = f"rank {self.rank} ({self.process.host}, pid {self.process.pid})"
        since = "" if self.seconds is None else f"; it has been in no collective for {_seconds(self.seconds)}"
        match self.state:
            case RankState.AWAY:
                text = f"is {self.doing}{at(self.line)}{since}"
            case RankState.COMPILES:
                text = f"is {self.doing}{at(self.line)}{since}. It is let alone"
            case RankState.CROSSED:
                text = f"is in a collective of another world{at(self.line)}{since}"
            case RankState.SILENT:
                text = "runs, but Python in it does not: C code keeps the interpreter's lock" + (
                    "" if self.stack else ", or Python has come to its end"
                )
            case RankState.STOPPED:
                text = (
                    f"is stopped (SIGSTOP, Ctrl-Z or a debugger); `kill -CONT {self.process.pid}` there lets it go on"
                )
            case RankState.ENDED:
                text = f"has ended: {self.doing}"
            case RankState.CUT_OFF:
                text = "does not answer, nor does any other rank of its host: it hangs, or the host, or the network"
            case RankState.UNKNOWN:
                text = f"cannot be asked: UDP does not get from here to {self.process.host}. It is let alone"
            case _:
                text = self.state.value
        stack = "".join(f"\n        {row}" for row in self.stack.splitlines())
        return f"    {who} {text}.{stack}"


def report(rank: int, about: str, line: str, waited: float, findings: Sequence[RankFinding], rest: str) -> str:
    """What is printed: on the terminal, once.

    Args:
      rank: who waits.
      about: in what.
      line: where that was called.
      findings: of all other ranks.
      rest: what will be done about it.
    """
    told = [finding for finding in findings if finding.state is not RankState.HERE]
    more = [f"    and {len(told) - _SHOWN} more ranks are not in it"] if len(told) > _SHOWN else []
    head = f"rank {rank} has waited for {_seconds(waited)} in {about}{at(line)}:"
    body = "\n".join([head, *map(str, told[:_SHOWN]), *more])
    return f"{body[:_MOST]}\n{rest}"


def given_up(about: str, waited: float, hang_timeout: float) -> str:
    """What a rank says that the others have waited for in vain.

    Args:
      about: in what they waited.
      waited: for how many seconds.
    """
    return (
        f"The others have given this process up: they waited for it for {_seconds(waited)} in {about}, and it did not "
        "answer. Was it stopped, or its host? The job has ended because of it, so it ends too. hang_timeout= of "
        f"comm.world() sets how long the others wait ({hang_timeout:g} s)."
    )


def names(ranks: Iterable[int]) -> str:
    """`rank 1`, or `ranks 1, 2`."""
    numbers = sorted(ranks)
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
