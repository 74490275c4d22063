"""Which ranks are reported, killed, or end the job: decisions from made-up sights, by a clock of the test."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from launchers.activity import INSIDE, LEFT, OUTSIDE, PATIENT, RECENT, ActivityReading, percentile
from launchers.hangs import UNSEEN, Action, GroupWait, Sight, default_limit
from launchers.inspection import GONE, RUNS, STOPPED, CoreTime

READING = ActivityReading(1, False, 60.0, OUTSIDE, 7, 1.0, "message 1 of step 6", None)
HERE = Sight("rank 0", READING._replace(phase=INSIDE, begun=8, about="message 1 of step 7"), {"pid": 10, "state": RUNS})


def rank_1(state: str = RUNS, reading: ActivityReading = READING, **seen: object) -> Sight:
    return Sight("rank 1", reading, {"pid": 11, "state": state, "answers": {}, "stack": "", "asked": False, **seen})


def says(doing: str = "in evaluate", core_time: CoreTime | None = None, **more: object) -> Sight:
    """A rank that is elsewhere, and answers."""
    answer = {"doing": doing, "idle": doing == "in a step", "compiles": False, "crossed": False, "stack": "", **more}
    return rank_1(answers={"1": answer}, asked=True, core_time=core_time)


ASLEEP = CoreTime(0.0, 1.0, 0.0)
SILENT = {"asked": True, "stack": "Current thread 0x1:\n  in match"}
ELSEWHERE = {
    "away": says(),
    "crossed": says(crossed=True),
    "silent": rank_1(**SILENT),
    "stopped": rank_1(STOPPED),
    "unseen": rank_1(UNSEEN),
    "not asked": rank_1(),
    "stopped in the operation": rank_1(STOPPED, HERE.reading),
}


class Watching:
    """An observer of rank 0, which waits from second 0 on, and of rank 1, whose sights a function of the time returns.

    Attributes:
      did: the decisions: when, what and for which ranks.
      said: their texts.
    """

    def __init__(self, other, *, survives=False, hang_timeout=60.0, usual=None, phase=INSIDE):
        self.other = other if callable(other) else lambda now: other
        self.setting = {"survives": survives, "hang_timeout": hang_timeout, "usual": usual}
        self.wait, self.now, self.did, self.said, self.phase = GroupWait(), 0.0, [], [], phase
        self.begun = 8

    def until(self, seconds, tick=0.25):
        """Let so many seconds pass. Returns the decisions."""
        while self.now < seconds:
            self.now += tick
            waits = {**self.setting, "phase": self.phase, "seconds": self.now, "begun": self.begun}
            theirs = {"seconds": self.now, "survives": self.setting["survives"]}
            other = self.other(self.now)
            here = replace(HERE, reading=HERE.reading._replace(**waits))
            other = replace(other, reading=other.reading._replace(**theirs))
            if (account := other.seen.get("core_time")) is not None:
                other = replace(other, seen={**other.seen, "core_time": account._replace(seconds=self.now)})
            if decision := self.wait.judge({0: here, 1: other}, self.now):
                self.did.append((self.now, decision.action, decision.ranks))
                self.said.append(decision.text)
        return self.did


@pytest.mark.parametrize("state", ELSEWHERE)
def test_a_late_rank_is_reported_and_then_ends_the_job(state):
    watching = Watching(ELSEWHERE[state])
    assert watching.until(200.0) == [(60.0, Action.REPORT, (1,)), (120.0, Action.END, (1,))]
    assert watching.said[0].startswith("rank 0 has waited for 60 s in message 1 of step 7:\n    rank 1 ")
    assert "Unless rank 1 comes, the job ends when that is 120 s. hang_timeout= of comm.world() " in watching.said[0]
    assert watching.said[1].endswith("The job ends because of rank 1.")


@pytest.mark.parametrize("state", ["away", "silent", "unseen", "stopped in the operation"])
def test_a_late_rank_is_killed_if_the_others_survive_that(state):
    watching = Watching(ELSEWHERE[state], survives=True)
    decisions = [(60.0, Action.REPORT, (1,)), (120.0, Action.KILL, (1,)), (180.0, Action.END, (1,))]  # it lives on
    assert watching.until(200.0) == decisions
    assert "Unless rank 1 comes, rank 1 will be killed when that is 120 s. " in watching.said[0]
    assert watching.said[1].endswith("rank 1: killed, and lost.")


def test_a_kill_that_would_not_help_ends_the_job():
    watching = Watching(ELSEWHERE["crossed"], survives=True)
    assert watching.until(130.0)[-1] == (120.0, Action.END, (1,))
    assert "Unless rank 1 comes, the job ends when that is 120 s. " in watching.said[0]


def test_time_when_the_observer_did_not_run_does_not_count():
    """The whole job was stopped for an hour."""
    watching = Watching(says())
    watching.until(50.0)
    watching.now += 3600.0
    watching.until(3650.5)
    assert watching.did == []
    assert watching.wait.waited < 60


def test_ranks_in_another_worlds_collective_wait_for_others():
    wait, waits = GroupWait(), {"survives": True, "phase": INSIDE}
    sights = {1: ELSEWHERE["crossed"], 2: replace(ELSEWHERE["away"], name="rank 2")}
    found = []
    for now in range(130):
        here = replace(HERE, reading=HERE.reading._replace(seconds=float(now), **waits))
        found.append(wait.judge({0: here, **sights}, now))
    assert [decision.ranks for decision in found if decision and decision.action is Action.KILL] == [(2,)]


@pytest.mark.parametrize("survives", [False, True])
@pytest.mark.parametrize("gone", [False, True])
def test_ranks_that_will_never_come_are_not_waited_for(gone, survives):
    left = READING._replace(phase=LEFT, about="its script is over, by OSError: no")
    watching = Watching(rank_1(GONE) if gone else rank_1(reading=left), survives=survives)
    assert watching.until(59.0) == [(1.0, Action.KILL if survives else Action.END, (1,))]
    assert gone or "rank 1 has ended: its script is over, by OSError: no." in watching.said[0]


@pytest.mark.parametrize(("other", "phase", "said"), [
    (replace(HERE, name="rank 1"), INSIDE, "As far as is known, all ranks are in it; its messages are slow, or were "),
    (says(compiles=True), INSIDE, "As far as is known, no rank is stuck."),
    (rank_1(asked=True, stack='File ".../jax/_src/compiler.py", line 9 in compile'), INSIDE, "no rank is"),
    (says(), PATIENT, "As far as is known, no rank is stuck."),  # at the end of the world
    (ELSEWHERE["crossed"], PATIENT, "As far as is known, no rank is stuck."),
])  # fmt: skip
def test_ranks_that_may_be_late_are_waited_for(other, phase, said):
    watching = Watching(other, phase=phase)
    assert watching.until(300.0) == [(60.0, Action.NOTE, (0, 1))]
    assert said in watching.said[0]


def test_time_counts_since_a_rank_was_well():
    watching = Watching(lambda now: says(compiles=now < 100))
    kinds = [(action, now) for now, action, _ in watching.until(300.0)]
    assert kinds == [(Action.NOTE, 60.0), (Action.REPORT, 159.75), (Action.END, 219.75)]


def test_waits_for_a_core_do_not_count():
    """Of the time after the first 30 s, the rank waits for a core for a half."""
    watching = Watching(lambda now: says(core_time=CoreTime(now, 0.0, max(0.0, now - 30.0) / 2)))
    assert [(now, action) for now, action, _ in watching.until(95.0)] == [(60.0, Action.NOTE), (90.0, Action.REPORT)]
    assert "that is 120 s, without waits for a core. " in watching.said[1]
    assert "It waited for a core for 0.1 s of the last 0.2 s, which does not count" in watching.said[1]


def test_another_operation_is_waited_for_anew():
    watching = Watching(says())
    for _ in range(5):
        watching.until(50.0)
        watching.now, watching.begun = 0.0, watching.begun + 1
    assert watching.did == []
    watching.until(70.0)
    watching.now, watching.begun = 0.0, watching.begun + 1
    assert [action for _, action, _ in watching.until(70.0)] == [Action.REPORT] * 2


@pytest.mark.parametrize("usual", [0.01, 0.5])
@pytest.mark.parametrize("other", [ELSEWHERE["stopped"], says("in a step", ASLEEP)])
def test_by_default_a_rank_that_does_nothing_is_killed_early(other, usual):
    """The limit is ten times that of an operation, and at least two seconds."""
    watching, limit = Watching(other, survives=True, hang_timeout=None, usual=usual), max(2.0, 10 * usual)
    late = [(now, action) for now, action, _ in watching.until(3 * limit)]
    assert late == [(limit, Action.REPORT), (2 * limit, Action.KILL)]
    assert f"rank 1 will be killed when that is {2 * limit:g} s. By default" in watching.said[0]


def test_a_rank_must_have_done_nothing_for_as_long_as_the_limit():
    watching = Watching(
        lambda now: ELSEWHERE["stopped" if now > 30.0 else "away"], survives=True, hang_timeout=None, usual=0.1
    )
    assert [action for _, action, _ in watching.until(30.5)] == []  # a single look may be a coincidence
    assert [(now, action) for now, action, _ in watching.until(58.0)] == [(30.75, Action.REPORT), (32.25, Action.KILL)]


@pytest.mark.parametrize(("other", "survives", "usual"), [
    (says(core_time=ASLEEP), True, 0.1),
    (says("in a step"), True, 0.1),  # whether it sleeps is unknown
    (rank_1(**SILENT, core_time=ASLEEP), True, 0.1),
    (ELSEWHERE["stopped"], False, 0.1),
    (ELSEWHERE["stopped"], True, None),  # too few operations
])  # fmt: skip
def test_others_have_a_minute_before_they_are_killed(other, survives, usual):
    watching = Watching(other, survives=survives, hang_timeout=None, usual=usual)
    reported = [] if survives else [Action.REPORT]
    assert [action for _, action, _ in watching.until(59.0)] == reported
    assert survives or "job ends when that is 120 s" in watching.said[0]


@pytest.mark.parametrize("noise", [
    lambda draw: draw.expovariate(2.0),
    lambda draw: 0.5 * draw.lognormvariate(0, 0.1) * (9 if draw.random() < 0.001 else 1),
])  # fmt: skip
def test_noisy_steps_are_no_alarm(noise):
    """50,000 steps: none is longer than the limit that the steps before it set."""
    draw = random.Random(0)
    seconds = [noise(draw) for _ in range(50_000)]
    begun = [0.0]
    for each in seconds:
        begun.append(begun[-1] + each)
    for k in range(RECENT, len(seconds), RECENT):
        assert max(seconds[k : k + RECENT]) < default_limit(percentile(begun[k - RECENT : k + 1]))
