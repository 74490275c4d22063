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

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from .activity import LEFT, PATIENT, ActivityReading
from .inspection import GONE, STOPPED, CoreTime, CoreUse, compiles

LONGEST = 60.0  # seconds, by default
_SHORTEST = 2.0  # seconds
_TIMES = 10.0  # the 99th percentile of the times of operations
_SEEN = 1 / 4  # fraction of the limit for which a rank must be seen to do nothing before it is reported
_DETAILS = 1 / 2  # fraction of the limit after which ranks are asked
_MOST_EXCUSED = 10.0  # times the limit, of waits for a core
_RARER = 1 / 8  # of the time waited: later rounds are as rare
_LATE_SECONDS = 3.0  # for which a round may be late; more means that the observer itself did not run
_LEAVES_SECONDS = 1.0  # for the others to end by themselves when a rank has left
UNSEEN = "unseen"  # the state of a process of which nothing is known now
_NO_USE = CoreUse()
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

    @property
    def well(self) -> bool:
        """Whether the rank will enter the operation, as far as is known."""
        return self in (State.HERE, State.COMPILES)


@dataclass(frozen=True)
class Sight:
    """What an observer has seen of one rank.

    Attributes:
      name: the rank, for messages.
      pid: its pid.
      reading: what its world is doing; None if nothing is known.
      process: the state of its process: see `inspection`; or UNSEEN.
      core_time: the kernel's account of its process, if available.
      answer: what it says of its world: `doing`, `idle` (in a step, and nowhere else), `compiles`, `crossed` (in a
        collective of another world) and `stack`; None if it was not asked, or did not answer.
      stack: its stack as faulthandler has written it, if it was asked and did not answer.
      asked: whether it was asked.
    """

    name: str
    pid: int
    reading: ActivityReading | None
    process: str
    core_time: CoreTime | None = None
    answer: Mapping[str, Any] | None = None
    stack: str = ""
    asked: bool = False

    @classmethod
    def of(cls, name: str, reading: ActivityReading, seen: Mapping[str, Any]) -> Sight:
        """Return the sight of a rank in one of its worlds, from the result of `inspection.inspect`."""
        account, answer = seen["core_time"], seen["answers"].get(str(reading.group))
        account = None if account is None else CoreTime(*account)
        return cls(name, seen["pid"], reading, seen["state"], account, answer, seen["stack"], seen["asked"])

    @property
    def state(self) -> State:
        """The state of the rank."""
        reading, answer = self.reading, self.answer
        if self.process == GONE or (reading is not None and reading.phase == LEFT):
            return State.LEFT
        if self.process in (STOPPED, UNSEEN):
            return State.STOPPED if self.process == STOPPED else State.UNSEEN
        if reading is not None and reading.inside:
            return State.HERE
        if compiles(self.stack) or (answer is not None and answer["compiles"]):
            return State.COMPILES
        if answer is not None:
            return State.CROSSED if answer["crossed"] else State.AWAY
        return State.SILENT if self.asked else State.AWAY


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
    """What is known of a rank since the others wait in the present operation. Times are in seconds waited.

    Attributes:
      sight: the latest one.
      well: when it was last well.
      nothing: since when it is known to do nothing; None if it does something.
      account: the latest account of its use of cores since it was well.
      core_use: its use of cores between the latest two.
      excused: seconds for which it waited for a core since it was well.
      killed: when it was killed.
    """

    sight: Sight
    well: float = 0.0
    nothing: float | None = None
    account: CoreTime | None = None
    core_use: CoreUse = _NO_USE
    excused: float = 0.0
    killed: float | None = None

    def see(self, sight: Sight, waited: float, most_excused: float) -> None:
        """Record a sight: when the rank was well, its use of cores, and since when it does nothing."""
        self.sight, self.core_use = sight, _NO_USE
        if sight.state.well:
            self.well, self.account, self.excused = waited, None, 0.0
        elif sight.core_time is not None:
            if self.account is not None:
                self.core_use = sight.core_time.use_since(self.account)
            self.account = sight.core_time
            self.excused = min(self.excused + self.core_use.wait, most_excused)
        if not self.does_nothing:
            self.nothing = None
        elif self.nothing is None:
            self.nothing = waited

    @property
    def does_nothing(self) -> bool:
        """Whether the rank is stopped, or in a step and asleep. Then it does not do anything that takes long."""
        idle = self.sight.answer is not None and self.sight.answer["idle"]
        state = self.sight.state
        return state is State.STOPPED or (state is State.AWAY and bool(idle) and self.core_use.sleeps)

    def __str__(self) -> str:
        sight, state, answer = self.sight, self.sight.state, self.sight.answer or {}
        doing, stack = answer.get("doing", ""), answer.get("stack", "") or sight.stack
        text = f"is {doing}" if doing and state in (State.AWAY, State.COMPILES) else state.value
        if state is State.STOPPED:
            text += f" (SIGSTOP or Ctrl-Z); `kill -CONT {sight.pid}` there resumes it"
        if state is State.COMPILES:
            text += ". Compiling is not limited"
        if sight.reading is not None and state is State.LEFT:
            text += f": {sight.reading.about}"
        elif sight.reading is not None and sight.reading.about:
            text += f". {_seconds(sight.reading.seconds)} ago it began {sight.reading.about}"
        if self.core_use.waits:
            wait, span = _seconds(self.core_use.wait), _seconds(self.core_use.seconds)
            text += f". It waited for a core for {wait} of the last {span}, which does not count"
        return f"    {sight.name} {text}.{''.join(f'{chr(10)}        {row}' for row in stack.splitlines())}"


class GroupWait:
    """The waits of the ranks of one group, as one observer sees them again and again.

    Attributes:
      waited: how long ranks have waited in the present operation, in seconds. Time when the observer did not run does
        not count: the whole job may have been stopped.
      shortest, longest: the limit for a rank that is known to do nothing, and for all others, in seconds.
    """

    def __init__(self) -> None:
        self.waited, self.shortest, self.longest = 0.0, LONGEST, LONGEST
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
        soon = [deadline - self.waited for deadline in (self.longest, 2 * self.longest) if deadline > self.waited]
        return max(0.25, min([_RARER * self.waited, *soon]))

    def judge(self, sights: Mapping[Any, Sight], now: float) -> HangDecision | None:
        """Record what was seen in a round, and return what follows; None if nothing does.

        Args:
          sights: all ranks of the group.
          now: the time by the observer's clock, in seconds.
        """
        here = {who: sight.reading for who, sight in sights.items() if sight.state is State.HERE and sight.reading}
        self._count(here, now)
        if not here:
            return None
        self._set_limits(here.values())
        ranks = {who: self._known.setdefault(who, _Rank(sight)) for who, sight in sights.items()}
        for who, rank in ranks.items():
            rank.see(sights[who], self.waited, _MOST_EXCUSED * self.longest)
        survives = any(reading.survives for reading in here.values())
        patient = any(reading.phase == PATIENT for reading in here.values())
        first = max(here, key=lambda who: here[who].seconds)
        head = f"{sights[first].name} has waited for {_seconds(self.waited)} in {here[first].about or 'a collective'}:"
        return self._decide(head, ranks, survives=survives, patient=patient)

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

    def _set_limits(self, here: Collection[ActivityReading]) -> None:
        given = [reading.hang_timeout for reading in here if reading.hang_timeout is not None]
        usual = [reading.usual for reading in here if reading.usual is not None]
        self.longest = given[0] if given else LONGEST
        self.shortest = given[0] if given else default_limit(max(usual, default=None))

    def _decide(self, head: str, ranks: Mapping[Any, _Rank], *, survives: bool, patient: bool) -> HangDecision | None:
        late, due = self._late(ranks, survives=survives, patient=patient)
        if due:
            lives = any(rank.killed is not None and self.waited - rank.killed >= self.longest for rank in due.values())
            if survives and not lives and _death_helps(due):
                for rank in due.values():
                    rank.killed = rank.killed or self.waited
                return self._new(Action.KILL, due, head, ranks, f"{_names(due)}: killed, and lost.")
            return self._new(Action.END, due, head, ranks, f"The job ends because of {_names(due)}.")
        if late:
            return self._new(Action.REPORT, late, head, ranks, self._outlook(late, survives=survives))
        if self.waited >= self.longest:
            everyone_here = all(rank.sight.state is State.HERE for rank in ranks.values())
            rest = "all ranks are in it; its messages are slow, or were lost" if everyone_here else "no rank is stuck"
            return self._new(Action.NOTE, ranks, head, ranks, f"As far as is known, {rest}.")
        return None

    def _late(
        self, ranks: Mapping[Any, _Rank], *, survives: bool, patient: bool
    ) -> tuple[dict[Any, _Rank], dict[Any, _Rank]]:
        """Return the ranks that are past the first deadline, and those past the second."""
        late, due = {}, {}
        for who, rank in ranks.items():
            state = rank.sight.state
            if state.well or (patient and state in (State.AWAY, State.CROSSED)):
                continue  # at the end of a world no rank waits for a result, so the others may be late
            left = state is State.LEFT and self.waited >= _LEAVES_SECONDS
            times = self._times_of_limit(rank, survives=survives)
            if left or times >= 1:
                late[who] = rank
                if left or (times >= 2 and (Action.REPORT, who) in self._reported):
                    due[who] = rank
        if any(rank.sight.state is not State.CROSSED for rank in late.values()):  # they wait for another rank
            due = {who: rank for who, rank in due.items() if rank.sight.state is not State.CROSSED}
        return late, due

    def _times_of_limit(self, rank: _Rank, *, survives: bool) -> float:
        """Return how long the others have waited for a rank, in multiples of the limit that applies to it.

        A rank that does nothing must be found so again and again: for a quarter of the limit before it is reported, and
        for the whole limit before it is killed. A single look may be a coincidence. Where the loss of a rank ends the
        job, that takes as long as for other ranks.
        """
        absent = self.waited - rank.well - rank.excused
        times = absent / self.longest
        seen = 0.0 if rank.nothing is None else self.waited - rank.nothing
        if rank.nothing is None or seen < _SEEN * self.shortest:
            return times
        short = absent / self.shortest
        return max(times, short if seen >= self.shortest and survives else min(short, 1.0))

    def _new(
        self, action: Action, about: Iterable[Any], head: str, ranks: Mapping[Any, _Rank], rest: str
    ) -> HangDecision | None:
        """Return a decision, unless it was made before."""
        new = {(action, who) for who in about}
        if new <= self._reported:
            return None
        self._reported |= new
        missing = [rank for rank in ranks.values() if rank.sight.state is not State.HERE]
        more = [f"    and {len(missing) - _SHOWN} more ranks are not in it"] if len(missing) > _SHOWN else []
        text = "\n".join([head, *map(str, missing[:_SHOWN]), *more, rest])
        return HangDecision(action, tuple(about), text)

    def _outlook(self, late: Mapping[Any, _Rank], *, survives: bool) -> str:
        """Return what happens if the late ranks do not come, and the setting that decides when."""
        kills = survives and _death_helps(late)
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


def default_limit(usual: float | None) -> float:
    """Return the limit for a rank that is known to do nothing, in seconds.

    Args:
      usual: the 99th percentile of the seconds between two operations; None if there were too few.
    """
    return LONGEST if usual is None else min(max(_SHORTEST, _TIMES * usual), LONGEST)


def _death_helps(ranks: Mapping[Any, _Rank]) -> bool:
    """Return whether the others could continue without these ranks. They do not if one waits in another world."""
    return all(rank.sight.state is not State.CROSSED for rank in ranks.values())


def _names(ranks: Mapping[Any, _Rank]) -> str:
    """Describe ranks, for the end of a report: `rank 1, rank 2`."""
    return ", ".join(rank.sight.name.partition(" (")[0] for rank in ranks.values())


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
