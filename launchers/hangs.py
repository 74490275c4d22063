"""Decides which ranks are stuck: they keep others waiting in an operation. Pure functions of what an observer has seen.

The launcher observes all ranks of its job (`watch.py`); without it, a rank observes those of its host.

* A rank that is in the operation, or waits for XLA's compiler, is well.
* A rank that is elsewhere, stopped, or does not answer, after the others have waited for a limit, is *stuck*. It is
  reported once.
* A rank that is still stuck after twice the limit is killed if the others can continue without it; otherwise the job
  ends.
* A rank that has left is not waited for.

The waiting time for a rank is the time since the first rank began to wait in this operation, without the time for which
the rank waited for a core. It starts again whenever the rank is found compiling.

The limit is `hang_timeout`. By default it depends on what is known of the rank. A rank that is stopped, or that uses no
core inside a step, does nothing: its limit is ten times the 99th percentile of the time of an operation in this run,
and at least two seconds. In all other cases (hooks, evaluation, checkpoints, input, the script's own code, tracing, C
code that holds the GIL, a debugger) the work may take long once in a while, and nothing measured says how long: the
limit is a minute. The first operations of a group are not enough to tell, so the minute applies to them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Any, NamedTuple

from .activity import LEFT, PATIENT, ActivityReading
from .inspection import GONE, STOPPED, CoreTime, compiles

LONGEST = 60.0  # seconds, by default
_SHORTEST = 2.0  # seconds
_TIMES = 10.0  # the 99th percentile of the times of operations
_SEEN = 1 / 4  # fraction of the limit for which a rank must be seen to do nothing before it is reported
_DETAILS = 1 / 2  # fraction of the limit after which ranks are asked
_MOST_EXCUSED = 10.0  # times the limit, of waits for a core
_SOONEST, _RARER = 0.25, 1 / 8  # seconds until the next round, and as a fraction of the time waited
_LATE_SECONDS = 3.0  # for which a round may be late; more means that the observer itself did not run
_LEAVES_SECONDS = 1.0  # for the others to end by themselves when a rank has left
UNSEEN = "unseen"  # the state of a process of which nothing is known now
_NO_USE = CoreTime()
_SHOWN = 8  # ranks with their stacks in a report; even a thousand ranks are mostly stuck in one place


class State(Enum):
    """The state of a rank while others wait for it in an operation of their world."""

    HERE = "waits in it, too"
    COMPILES = "is compiling"
    AWAY = "is not in it"
    CROSSED = "is in a collective of another world"
    SILENT = "runs, but its Python does not answer: C code holds the GIL, or a debugger holds the process"
    STOPPED = "is stopped"
    UNSEEN = "cannot be examined: the process that has started it does not answer"
    LEFT = "has ended"


@dataclass(frozen=True)
class Sight:
    """What an observer has seen of one rank in one of its worlds."""

    name: str  # the rank, for messages
    reading: ActivityReading | None  # what the world is doing; None if nothing is known
    seen: Mapping[str, Any]  # fields of `inspection.inspect`, at least `pid` and `state`, which may also be UNSEEN

    @property
    def answer(self) -> Mapping[str, Any]:
        """What the rank says of the world (`Watchdog.describe`); empty if it was not asked, or did not answer."""
        return {} if self.reading is None else self.seen.get("answers", {}).get(str(self.reading.group), {})

    @property
    def stack(self) -> str:
        """The rank's stack, as it says or as faulthandler has written it; "" if unknown."""
        return self.answer.get("stack", "") or self.seen.get("stack", "")

    @property
    def state(self) -> State:
        """The state of the rank."""
        reading, answer, state = self.reading, self.answer, self.seen["state"]
        if state == GONE or (reading is not None and reading.phase == LEFT):
            return State.LEFT
        if state in (STOPPED, UNSEEN):
            return State.STOPPED if state == STOPPED else State.UNSEEN
        if reading is not None and reading.inside:
            return State.HERE
        if compiles(self.seen.get("stack", "")) or answer.get("compiles"):
            return State.COMPILES
        if answer:
            return State.CROSSED if answer["crossed"] else State.AWAY
        return State.SILENT if self.seen.get("asked") else State.AWAY


class Action(Enum):
    """What follows from a round."""

    NOTE = "the ranks wait, and none is stuck"
    REPORT = "ranks are stuck"
    KILL = "ranks have to be killed"
    END = "the job has to be ended"


class HangDecision(NamedTuple):
    """What has to be done now, the ranks that it concerns, and the report."""

    action: Action
    ranks: tuple[Any, ...]
    text: str


@dataclass
class _Rank:
    """What is known of a rank since the others wait in the present operation. Times are in seconds waited."""

    sight: Sight  # the latest one
    well: float = 0.0  # when it was last well: in the operation, or compiling
    nothing: float | None = None  # since when it is known to do nothing; None if it does something
    account: CoreTime | None = None  # the latest account of its use of cores since it was well
    core_use: CoreTime = _NO_USE  # its use of cores between the latest two
    excused: float = 0.0  # seconds for which it waited for a core since it was well
    killed: float | None = None  # when it was killed

    @property
    def crossed(self) -> bool:
        """Whether the rank is in a collective of another world, and so waits for others, too."""
        return self.sight.state is State.CROSSED

    def see(self, sight: Sight, waited: float, most_excused: float) -> None:
        """Record a sight."""
        self.sight, self.core_use, account = sight, _NO_USE, sight.seen.get("core_time")
        if sight.state in (State.HERE, State.COMPILES):
            self.well, self.account, self.excused = waited, None, 0.0
        elif account is not None:
            if self.account is not None:
                self.core_use = CoreTime(*account).since(self.account)
            self.account = CoreTime(*account)
            self.excused = min(self.excused + self.core_use.queued, most_excused)
        self.nothing = (waited if self.nothing is None else self.nothing) if self.does_nothing else None

    @property
    def does_nothing(self) -> bool:
        """Whether the rank is stopped, or in a step and asleep. Then it does not do anything that takes long."""
        state = self.sight.state
        return state is State.STOPPED or (
            state is State.AWAY and self.sight.answer.get("idle", False) and self.core_use.sleeps
        )

    def __str__(self) -> str:
        sight, state, reading, core_use = self.sight, self.sight.state, self.sight.reading, self.core_use
        doing = sight.answer.get("doing", "")
        text = f"is {doing}" if doing and state in (State.AWAY, State.COMPILES) else state.value
        if state is State.STOPPED:
            text += f" (SIGSTOP or Ctrl-Z); `kill -CONT {sight.seen['pid']}` there resumes it"
        if state is State.COMPILES:
            text += ". Compiling is not limited"
        if reading is not None and state is State.LEFT:
            text += f": {reading.about}"
        elif reading is not None and reading.about:
            text += f". {_seconds(reading.seconds)} ago it began {reading.about}"
        if core_use.waits:
            text += f". It waited for a core for {_seconds(core_use.queued)} of the last {_seconds(core_use.seconds)}, "
            text += "which does not count"
        return "\n        ".join([f"    {sight.name} {text}.", *sight.stack.splitlines()])


class GroupWait:
    """The waits of the ranks of one group, as one observer sees them again and again.

    Attributes:
      waited: seconds for which ranks have waited in the present operation. Time when the observer did not run does not
        count: the whole job may have been stopped.
      shortest, longest: the limit for a rank that is known to do nothing, and for all others, in seconds.
    """

    def __init__(self) -> None:
        self.waited, self.shortest, self.longest = 0.0, LONGEST, LONGEST
        self._survives = self._patient = False
        self._judged = 0.0  # when the latest round was
        self._begun: dict[Any, int] = {}  # the operation of each rank that waits
        self._known: dict[Any, _Rank] = {}  # since the present operation began
        self._reported: set[tuple[Action, Any]] = set()

    @property
    def wants_details(self) -> bool:
        """Whether ranks that are not in the operation should be asked in the next round."""
        return self.waited >= _DETAILS * self.shortest

    @property
    def next_round(self) -> float:
        """Seconds until the next round."""
        return max(_SOONEST, _RARER * self.waited)

    def judge(self, sights: Mapping[Any, Sight], now: float) -> HangDecision | None:
        """Record what was seen of all ranks of the group in a round, at the time `now` of the observer's clock, and
        return what follows; None if nothing does.
        """
        here = {who: sight.reading for who, sight in sights.items() if sight.state is State.HERE and sight.reading}
        self._count(here, now)
        if not here:
            return None
        first = max(here, key=lambda who: here[who].seconds)
        given, self._survives = here[first].hang_timeout, here[first].survives  # the same on all ranks
        usual = max((reading.usual for reading in here.values() if reading.usual is not None), default=None)
        self.longest = LONGEST if given is None else given
        self.shortest = default_limit(usual) if given is None else given
        self._patient = any(reading.phase == PATIENT for reading in here.values())
        for who, sight in sights.items():
            self._known.setdefault(who, _Rank(sight)).see(sight, self.waited, _MOST_EXCUSED * self.longest)
        head = f"{sights[first].name} has waited for {_seconds(self.waited)} in {here[first].about or 'a collective'}:"
        return self._decide(head, {who: self._known[who] for who in sights})

    def _count(self, here: Mapping[Any, ActivityReading], now: float) -> None:
        """Count the time since the round before."""
        begun = {who: reading.begun for who, reading in here.items()}
        if not here or any(number != self._begun.get(who, number) for who, number in begun.items()):
            self.waited, self._known, self._reported = 0.0, {}, set()
        passed = min(now - self._judged, self.next_round + _LATE_SECONDS)
        if self.waited == 0.0:
            passed = min(max((reading.seconds for reading in here.values()), default=0.0), _LATE_SECONDS)
        self.waited += passed
        self._judged, self._begun = now, begun

    def _decide(self, head: str, ranks: Mapping[Any, _Rank]) -> HangDecision | None:
        times = {who: self._times_of_limit(rank) for who, rank in ranks.items()}
        late = {who: rank for who, rank in ranks.items() if times[who] >= 1}
        all_crossed = all(rank.crossed for rank in late.values())  # else these wait for another one
        due = {
            who: rank
            for who, rank in late.items()
            if (times[who] == inf or (times[who] >= 2 and (Action.REPORT, who) in self._reported))
            and (all_crossed or not rank.crossed)
        }
        if due:
            lives = any(rank.killed is not None and self.waited - rank.killed >= self.longest for rank in due.values())
            if self._can_lose(due) and not lives:
                for rank in due.values():
                    rank.killed = rank.killed or self.waited
                return self._new(Action.KILL, due, head, ranks, f"{_names(due)}: killed, and lost.")
            return self._new(Action.END, due, head, ranks, f"The job ends because of {_names(due)}.")
        if late:
            return self._new(Action.REPORT, late, head, ranks, self._outlook(late))
        if self.waited >= self.longest:
            everyone_here = all(rank.sight.state is State.HERE for rank in ranks.values())
            rest = "all ranks are in it; its messages are slow, or were lost" if everyone_here else "no rank is stuck"
            return self._new(Action.NOTE, ranks, head, ranks, f"As far as is known, {rest}.")
        return None

    def _times_of_limit(self, rank: _Rank) -> float:
        """Return how long the others have waited for a rank, in multiples of the limit that applies to it.

        A rank that does nothing must be found so again and again: for a quarter of the limit before it is reported, and
        for the whole limit before it is killed. A single look may be a coincidence. Where the loss of a rank ends the
        job, that takes as long as for other ranks.
        """
        state = rank.sight.state
        if self._patient and state in (State.AWAY, State.CROSSED):
            return 0.0  # at the end of a world no rank waits for a result, so the others may be late
        if state is State.LEFT and self.waited >= _LEAVES_SECONDS:
            return inf
        absent = self.waited - rank.well - rank.excused
        seen = 0.0 if rank.nothing is None else self.waited - rank.nothing
        if rank.nothing is None or seen < _SEEN * self.shortest:
            return absent / self.longest
        short = absent / self.shortest
        return max(absent / self.longest, short if seen >= self.shortest and self._survives else min(short, 1.0))

    def _new(
        self, action: Action, about: Iterable[Any], head: str, ranks: Mapping[Any, _Rank], rest: str
    ) -> HangDecision | None:
        """Return a decision, if it is new."""
        new = {(action, who) for who in about}
        if new <= self._reported:
            return None
        self._reported |= new
        missing = [rank for rank in ranks.values() if rank.sight.state is not State.HERE]
        more = [f"    and {len(missing) - _SHOWN} more ranks are not in it"] if len(missing) > _SHOWN else []
        text = "\n".join([head, *map(str, missing[:_SHOWN]), *more, rest])
        return HangDecision(action, tuple(about), text)

    def _outlook(self, late: Mapping[Any, _Rank]) -> str:
        """Return what happens if the late ranks do not come, and the setting that decides when."""
        kills = self._can_lose(late)
        what = f"{_names(late)} will be killed" if kills else "the job ends"
        soon = kills and all(rank.does_nothing for rank in late.values())
        until = 2 * (self.shortest if soon else self.longest)
        without = ", without waits for a core" * any(rank.excused > 0 for rank in late.values())
        if self.shortest == self.longest:
            setting = f"hang_timeout= of comm.world() sets the time ({self.longest:g} s; 0: no limit)."
        else:
            setting = (
                f"By default that is {self.shortest:.1f} s for a rank that is stopped or idle in a step, and "
                f"{self.longest:g} s for others; hang_timeout= of comm.world() sets one time (0: no limit)."
            )
        comes = f"{_names(late)} come{'s' * (len(late) == 1)}"
        return f"Unless {comes}, {what} when that is {until:.3g} s{without}. {setting}"

    def _can_lose(self, ranks: Mapping[Any, _Rank]) -> bool:
        """Return whether the others can continue without these ranks. They cannot if one waits in another world."""
        return self._survives and not any(rank.crossed for rank in ranks.values())


def default_limit(usual: float | None) -> float:
    """Return the limit for a rank that is known to do nothing, in seconds; `usual`: see `ActivityReading`."""
    return LONGEST if usual is None else min(max(_SHORTEST, _TIMES * usual), LONGEST)


def _names(ranks: Mapping[Any, _Rank]) -> str:
    """Describe ranks, for the end of a report: `rank 1, rank 2`."""
    return ", ".join(rank.sight.name.partition(" (")[0] for rank in ranks.values())


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
