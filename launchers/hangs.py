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

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from .activity import LEFT, PATIENT, ActivityReading
from .inspection import GONE, STOPPED, TRACED, CoreTime, CoreUse, compiles

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
_SHOWN = 8  # ranks with their stacks in a report; even a thousand ranks are mostly stuck in one place


@dataclass(frozen=True)
class Sight:
    """What an observer has seen of one rank.

    Attributes:
      name: the rank, for messages.
      pid: its pid.
      reading: what its world is doing; None if nothing is known.
      state: the state of its process: see `inspection`; or UNSEEN.
      at: when it was seen, by a clock of its host, in seconds.
      core_time: the kernel's account of its process, if available.
      answer: what it says of its world: `doing`, `idle` (in a step, and nowhere else), `compiles`, `crossed` (in a
        collective of another world) and `stack`; None if it was not asked, or did not answer.
      stack: its stack as faulthandler has written it, if it was asked and did not answer.
      asked: whether it was asked.
    """

    name: str
    pid: int
    reading: ActivityReading | None
    state: str
    at: float
    core_time: CoreTime | None = None
    answer: Mapping[str, Any] | None = None
    stack: str = ""
    asked: bool = False

    @classmethod
    def of(cls, name: str, reading: ActivityReading, seen: Mapping[str, Any]) -> Sight:
        """Return the sight of a rank in one of its worlds, from the result of `inspection.inspect`."""
        account = seen["core_time"]
        return cls(
            name=name,
            pid=seen["pid"],
            reading=reading,
            state=seen["state"],
            at=seen["at"],
            core_time=None if account is None else CoreTime(*account),
            answer=seen["answers"].get(str(reading.group)),
            stack=seen["stack"],
            asked=seen["asked"],
        )


class State(Enum):
    """The state of a rank while others wait for it in an operation of their world."""

    HERE = "waits in it, too"
    COMPILES = "is compiling"
    AWAY = "is not in it"
    CROSSED = "is in a collective of another world"
    SILENT = "runs, but its Python does not answer: C code holds the GIL"
    STOPPED = "is stopped"
    TRACED = "is held by a debugger"
    UNSEEN = "cannot be examined: the process that has started it does not answer"
    LEFT = "has ended"

    @property
    def well(self) -> bool:
        """Whether the rank will enter the operation, as far as is known."""
        return self in (State.HERE, State.COMPILES)


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
class _RankWait:
    """What is known of a rank since the others wait in the present operation. Times are in seconds waited.

    Attributes:
      well: when it was last well.
      nothing: since when it is known to do nothing; None if it does something.
      account: the latest account of its use of cores, and when that was.
      excused: seconds for which it waited for a core since it was well.
      killed: when it was killed.
    """

    well: float = 0.0
    nothing: float | None = None
    account: tuple[float, CoreTime] | None = None
    excused: float = 0.0
    killed: float | None = None


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
        self._begin()

    def _begin(self) -> None:
        self.waited = 0.0
        self._ranks: defaultdict[Any, _RankWait] = defaultdict(_RankWait)
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
        findings = {who: RankFinding.of(sight) for who, sight in sights.items()}
        here = {who: f.sight.reading for who, f in findings.items() if f.state is State.HERE and f.sight.reading}
        self._count(here, now)
        if not here:
            return None
        self._set_limits(here.values())
        for who, finding in findings.items():
            self._record(self._ranks[who], finding)
        survives = any(reading.survives for reading in here.values())
        patient = any(reading.phase == PATIENT for reading in here.values())
        late, due = self._late(findings, survives=survives, patient=patient)
        first = max(here, key=lambda who: here[who].seconds)
        head = f"{sights[first].name} has waited for {_seconds(self.waited)} in {here[first].about or 'a collective'}:"
        return self._decide(head, findings, late, due, survives=survives)

    def _count(self, here: Mapping[Any, ActivityReading], now: float) -> None:
        """Count the time since the round before."""
        begun = {who: reading.begun for who, reading in here.items()}
        if not here or any(number != self._begun.get(who, number) for who, number in begun.items()):
            self._begin()
        passed = min(now - self._judged, self.next_round + _LATE_SECONDS)
        if self.waited == 0.0:
            passed = min(max((reading.seconds for reading in here.values()), default=0.0), _LATE_SECONDS)
        self.waited += passed
        self._judged, self._begun = now, begun

    def _set_limits(self, here: Collection[ActivityReading]) -> None:
        given = [reading.hang_timeout for reading in here if reading.hang_timeout is not None]
        if given:
            self.shortest = self.longest = given[0]
            return
        usual = [reading.usual for reading in here if reading.usual is not None]
        self.longest, self.shortest = LONGEST, default_limit(max(usual, default=None))

    def _record(self, rank: _RankWait, finding: RankFinding) -> None:
        """Record when a rank was well, its use of cores, and since when it does nothing."""
        sight = finding.sight
        if finding.state.well:
            rank.well, rank.account, rank.excused = self.waited, None, 0.0
        elif sight.core_time is not None:
            before, earlier = rank.account or (sight.at, sight.core_time)
            finding.core_use = sight.core_time.use_since(earlier, sight.at - before)
            rank.account = sight.at, sight.core_time
            rank.excused = min(rank.excused + finding.core_use.wait, _MOST_EXCUSED * self.longest)
        if not finding.does_nothing:
            rank.nothing = None
        elif rank.nothing is None:
            rank.nothing = self.waited

    def _late(
        self, findings: Mapping[Any, RankFinding], *, survives: bool, patient: bool
    ) -> tuple[dict[Any, RankFinding], dict[Any, RankFinding]]:
        """Return the findings of ranks that are past the first deadline, and of those past the second."""
        late, due = {}, {}
        for who, finding in findings.items():
            if finding.state.well or (patient and finding.state in (State.AWAY, State.CROSSED)):
                continue  # at the end of a world no rank waits for a result, so the others may be late
            left = finding.state is State.LEFT and self.waited >= _LEAVES_SECONDS
            times = self._times_of_limit(self._ranks[who], survives=survives)
            if left or times >= 1:
                late[who] = finding
                if left or (times >= 2 and (Action.REPORT, who) in self._reported):
                    due[who] = finding
        if any(finding.state is not State.CROSSED for finding in late.values()):  # they wait for another rank
            due = {who: finding for who, finding in due.items() if finding.state is not State.CROSSED}
        return late, due

    def _times_of_limit(self, rank: _RankWait, *, survives: bool) -> float:
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

    def _decide(
        self,
        head: str,
        findings: Mapping[Any, RankFinding],
        late: Mapping[Any, RankFinding],
        due: Mapping[Any, RankFinding],
        *,
        survives: bool,
    ) -> HangDecision | None:
        if due:
            killed = [rank.killed for who in due if (rank := self._ranks[who]).killed is not None]
            lives = any(self.waited - since >= self.longest for since in killed)
            if survives and not lives and _death_helps(due):
                for who in due:
                    self._ranks[who].killed = self._ranks[who].killed or self.waited
                return self._new(Action.KILL, due, head, findings, f"{_names(due)}: killed, and lost.")
            return self._new(Action.END, due, head, findings, f"The job ends because of {_names(due)}.")
        if late:
            return self._new(Action.REPORT, late, head, findings, self._outlook(late, survives=survives))
        if self.waited >= self.longest:
            everyone_here = all(finding.state is State.HERE for finding in findings.values())
            rest = "all ranks are in it; its messages are slow, or were lost" if everyone_here else "no rank is stuck"
            return self._new(Action.NOTE, findings, head, findings, f"As far as is known, {rest}.")
        return None

    def _new(
        self, action: Action, about: Iterable[Any], head: str, findings: Mapping[Any, RankFinding], rest: str
    ) -> HangDecision | None:
        """Return a decision, unless it was made before."""
        new = {(action, who) for who in about}
        if new <= self._reported:
            return None
        self._reported |= new
        missing = [finding for finding in findings.values() if finding.state is not State.HERE]
        more = [f"    and {len(missing) - _SHOWN} more ranks are not in it"] if len(missing) > _SHOWN else []
        text = "\n".join([head, *map(str, missing[:_SHOWN]), *more, rest])
        return HangDecision(action, tuple(about), text)

    def _outlook(self, late: Mapping[Any, RankFinding], *, survives: bool) -> str:
        kills = survives and _death_helps(late)
        what = f"{_names(late)} will be killed" if kills else "the job ends"
        soon = kills and all(finding.does_nothing for finding in late.values())
        until = 2 * (self.shortest if soon else self.longest)
        without = ", without waits for a core" * any(self._ranks[who].excused > 0 for who in late)
        return (
            f"Unless {_names(late)} come{'s' * (len(late) == 1)}, {what} when that is {until:.3g} s{without}. "
            f"{describe_limits(self.shortest, self.longest)}"
        )


def default_limit(usual: float | None) -> float:
    """Return the limit for a rank that is known to do nothing, in seconds.

    Args:
      usual: the 99th percentile of the seconds between two operations; None if there were too few.
    """
    return LONGEST if usual is None else min(max(_SHORTEST, _TIMES * usual), LONGEST)


def describe_limits(shortest: float, longest: float) -> str:
    """Return a sentence about the setting.

    Args:
      shortest: the present limit for a rank that does nothing, in seconds.
      longest: the limit for others.
    """
    if shortest == longest:
        return f"hang_timeout= of comm.world() sets the time ({longest:g} s; 0: no limit)."
    return (
        f"By default that is {shortest:.1f} s for a rank that is stopped or idle in a step, and {longest:g} s for "
        "others; hang_timeout= of comm.world() sets one time (0: no limit)."
    )


@dataclass
class RankFinding:
    """What a sight says of a rank.

    Attributes:
      sight: the sight.
      state: the rank's state.
      core_use: its use of cores since it was seen before.
    """

    sight: Sight
    state: State
    core_use: CoreUse = field(default_factory=CoreUse)

    @classmethod
    def of(cls, sight: Sight) -> RankFinding:
        """Return the finding of a sight."""
        return cls(sight, _state(sight))

    @property
    def does_nothing(self) -> bool:
        """Whether the rank is stopped, or in a step and asleep. Then it does not do anything that takes long."""
        idle = self.sight.answer is not None and self.sight.answer["idle"]
        return self.state is State.STOPPED or (self.state is State.AWAY and bool(idle) and self.core_use.sleeps)

    def __str__(self) -> str:
        sight, answer = self.sight, self.sight.answer or {}
        doing, stack = answer.get("doing", ""), answer.get("stack", "") or sight.stack
        text = self.state.value
        match self.state:
            case State.AWAY | State.COMPILES if doing:
                text = f"is {doing}"
            case State.STOPPED:
                text = f"is stopped (SIGSTOP or Ctrl-Z); `kill -CONT {sight.pid}` there resumes it"
        if self.state is State.COMPILES:
            text += ". Compiling is not limited"
        if sight.reading is not None and self.state is State.LEFT:
            text += f": {sight.reading.about}"
        elif sight.reading is not None and sight.reading.about:
            text += f". {_seconds(sight.reading.seconds)} ago it began {sight.reading.about}"
        if self.core_use.waits:
            wait, span = _seconds(self.core_use.wait), _seconds(self.core_use.seconds)
            text += f". It waited for a core for {wait} of the last {span}, which does not count"
        return f"    {sight.name} {text}.{''.join(f'{chr(10)}        {row}' for row in stack.splitlines())}"


_AS_SEEN = {STOPPED: State.STOPPED, TRACED: State.TRACED, UNSEEN: State.UNSEEN}


def _state(sight: Sight) -> State:
    reading = sight.reading
    if sight.state == GONE or (reading is not None and reading.phase == LEFT):
        return State.LEFT
    if sight.state in _AS_SEEN:
        return _AS_SEEN[sight.state]
    if reading is not None and reading.inside:
        return State.HERE
    if sight.answer is not None:
        crossed = State.CROSSED if sight.answer["crossed"] else State.AWAY
        return State.COMPILES if sight.answer["compiles"] else crossed
    if compiles(sight.stack):
        return State.COMPILES
    return State.SILENT if sight.asked else State.AWAY


def _death_helps(findings: Mapping[Any, RankFinding]) -> bool:
    """Return whether the others could continue without these ranks. They do not if one waits in another world."""
    return all(finding.state is not State.CROSSED for finding in findings.values())


def _names(findings: Mapping[Any, RankFinding]) -> str:
    """Describe ranks, for the end of a report: `rank 1, rank 2`."""
    return ", ".join(finding.sight.name.partition(" (")[0] for finding in findings.values())


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
