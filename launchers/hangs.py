"""Decides which ranks are stuck: they keep others waiting in an operation. Pure functions of what an observer has seen.

The launcher observes all ranks of its job (`watch.py`); without it, a rank observes those of its host.

* A rank that is in the operation, or waits for XLA's compiler, is well.
* A rank that is elsewhere, stopped, or does not answer, after the others have waited for a limit, is *stuck*. It is
  reported once.
* A rank that is still stuck after twice the limit is killed if the others can continue without it; otherwise the job
  ends.
* A rank that has left is not waited for.

The waiting time for a rank is the longest time that any rank has waited in this operation, without the time for which
the rank waited for a core. It starts again whenever the rank is found compiling.

The limit is `hang_timeout`. By default it depends on what is known of the rank. A rank that is stopped, or that uses no
core inside a step, does nothing: its limit is ten times the 99th percentile of the time of an operation in this run,
and at least two seconds. In all other cases (hooks, evaluation, checkpoints, input, the script's own code, tracing, C
code that holds the GIL, a debugger) the work may take long once in a while, and nothing measured says how long: the
limit is a minute. The first operations of a group are not enough to tell, so the minute applies to them too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from .activity import INSIDE, LEFT, PATIENT, ActivityReading
from .inspection import GONE, STOPPED, TRACED, CoreTime, CoreUse, compiles

LONGEST = 60.0  # seconds, by default
_SHORTEST = 2.0  # seconds
_TIMES = 10.0  # the 99th percentile of the times of operations
_SEEN = 1 / 4  # fraction of the limit for which a rank must be seen to do nothing before it is reported
_DETAILS = 1 / 2  # fraction of the limit after which ranks are asked
_MOST_EXCUSED = 10.0  # times the limit, of waits for a core
_RARER = 1 / 8  # of the time waited: later rounds are as rare
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


class GroupWait:
    """The waits of the ranks of one group, as one observer sees them again and again.

    Attributes:
      waited: the longest time that a rank has waited in the present operation, in seconds.
      shortest, longest: the limit for a rank that is known to do nothing, and for all others, in seconds.
    """

    def __init__(self) -> None:
        self.waited, self.shortest, self.longest = 0.0, LONGEST, LONGEST
        self._begun: dict[Any, int] = {}  # the operation of each rank that waits
        self._begin()

    def _begin(self) -> None:
        self._well: dict[Any, float] = {}  # when each rank was last well, in seconds waited
        self._nothing: dict[Any, float] = {}  # since when each rank is known to do nothing, in seconds waited
        self._accounts: dict[Any, tuple[float, CoreTime]] = {}
        self._excused: dict[Any, float] = {}
        self._killed: dict[Any, float] = {}
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

    def judge(self, sights: Mapping[Any, Sight], end: str = "the job ends") -> HangDecision | None:
        """Record what was seen in a round, and return what follows; None if nothing does.

        Args:
          sights: all ranks of the group.
          end: what follows where stuck ranks cannot be killed.
        """
        findings = {who: RankFinding.of(sight) for who, sight in sights.items()}
        here = {who: f.sight.reading for who, f in findings.items() if f.state is State.HERE and f.sight.reading}
        begun = {who: reading.begun for who, reading in here.items()}
        if not here or any(number != self._begun.get(who, number) for who, number in begun.items()):
            self._begin()
        self._begun = begun
        self.waited = max((reading.waited for reading in here.values()), default=0.0)
        if not here:
            return None
        self._set_limits(here.values())
        for who, finding in findings.items():
            self._record(who, finding)
        survives = any(reading.survives for reading in here.values())
        patient = any(reading.phase == PATIENT for reading in here.values())
        late, due = self._late(findings, survives=survives, patient=patient)
        first = max(here, key=lambda who: here[who].waited)
        head = f"{sights[first].name} has waited for {_seconds(self.waited)} in {here[first].about or 'a collective'}:"
        return self._decide(head, findings, late, due, survives=survives, end=end)

    def _set_limits(self, here: Collection[ActivityReading]) -> None:
        given = [reading.hang_timeout for reading in here if reading.hang_timeout is not None]
        if given:
            self.shortest = self.longest = given[0]
            return
        usual = [reading.usual for reading in here if reading.usual is not None]
        self.longest, self.shortest = LONGEST, default_limit(max(usual, default=None))

    def _record(self, who: Any, finding: RankFinding) -> None:
        """Record when a rank was well, and its use of cores."""
        sight = finding.sight
        if finding.state.well:
            self._well[who] = self.waited
            for records in (self._accounts, self._excused, self._nothing):
                records.pop(who, None)
        elif sight.core_time is not None:
            before, earlier = self._accounts.get(who, (sight.at, sight.core_time))
            finding.core_use = sight.core_time.use_since(earlier, sight.at - before)
            self._accounts[who] = sight.at, sight.core_time
            excused = self._excused.get(who, 0.0) + finding.core_use.wait
            self._excused[who] = min(excused, _MOST_EXCUSED * self.longest)

    def _late(
        self, findings: Mapping[Any, RankFinding], *, survives: bool, patient: bool
    ) -> tuple[dict[Any, RankFinding], dict[Any, RankFinding]]:
        """Return the findings of ranks that are past the first deadline, and of those past the second."""
        late, due = {}, {}
        for who, finding in findings.items():
            if finding.state.well or (patient and finding.state in (State.AWAY, State.CROSSED)):
                continue  # at the end of a world no rank waits for a result, so the others may be late
            left = finding.state is State.LEFT and self.waited >= _LEAVES_SECONDS
            times = self._times_of_limit(who, finding, survives=survives)
            if left or times >= 1:
                late[who] = finding
                if left or (times >= 2 and (Action.REPORT, who) in self._reported):
                    due[who] = finding
        if any(finding.state is not State.CROSSED for finding in late.values()):  # they wait for another rank
            due = {who: finding for who, finding in due.items() if finding.state is not State.CROSSED}
        return late, due

    def _times_of_limit(self, who: Any, finding: RankFinding, *, survives: bool) -> float:
        """Return how long the others have waited for a rank, in multiples of the limit that applies to it.

        A rank that does nothing must be found so again and again: for a quarter of the limit before it is reported, and
        for the whole limit before it is killed. A single look may be a coincidence. Where the loss of a rank ends the
        job, that takes as long as for other ranks.
        """
        absent = self.waited - self._well.get(who, 0.0) - self._excused.get(who, 0.0)
        times = absent / self.longest
        if not finding.does_nothing:
            self._nothing.pop(who, None)
            return times
        seen = self.waited - self._nothing.setdefault(who, self.waited)
        if seen < _SEEN * self.shortest:
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
        end: str,
    ) -> HangDecision | None:
        if due:
            helps = all(finding.state is not State.CROSSED for finding in due.values())
            lives = any(self.waited - self._killed.get(who, self.waited) >= self.longest for who in due)
            ranks = rank_names(due.values())
            if survives and helps and not lives:
                for who in due:
                    self._killed.setdefault(who, self.waited)
                return self._new(Action.KILL, due, head, findings, f"{ranks}: killed, and lost.")
            return self._new(Action.END, due, head, findings, f"{end[:1].upper()}{end[1:]} because of {ranks}.")
        if late:
            return self._new(Action.REPORT, late, head, findings, self._outlook(late, survives=survives, end=end))
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

    def _outlook(self, late: Mapping[Any, RankFinding], *, survives: bool, end: str) -> str:
        ranks = rank_names(late.values())
        what = f"{ranks} will be killed" if survives else end
        soon = survives and all(finding.does_nothing for finding in late.values())
        until = 2 * (self.shortest if soon else self.longest)
        without = ", without waits for a core" * any(self._excused.get(who, 0.0) > 0 for who in late)
        return (
            f"Unless {ranks} come{'s' * (len(late) == 1)}, {what} when that is {until:.3g} s{without}. "
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
    if reading is not None and reading.phase in (INSIDE, PATIENT):
        return State.HERE
    if sight.answer is not None:
        crossed = State.CROSSED if sight.answer["crossed"] else State.AWAY
        return State.COMPILES if sight.answer["compiles"] else crossed
    if compiles(sight.stack):
        return State.COMPILES
    return State.SILENT if sight.asked else State.AWAY


def rank_names(findings: Iterable[RankFinding]) -> str:
    """Describe ranks, for the end of a report: `rank 1, rank 2`."""
    return ", ".join(finding.sight.name.partition(" (")[0] for finding in findings)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
