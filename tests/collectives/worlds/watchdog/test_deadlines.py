"""When a rank that waits reports, kills or ends others, by a clock of the test; the other ranks are made up."""

from __future__ import annotations

import logging
import re
import sys
import threading
from types import SimpleNamespace

import pytest

from adaptive.base.thread_status import IN_A_STEP, thread_status
from collectives.worlds.transport.operations import BARRIER, CLOSE, Operation
from collectives.worlds.watchdog import watchdog
from collectives.worlds.watchdog.core_time import CoreTime
from collectives.worlds.watchdog.findings import RankFinding, RankState
from collectives.worlds.watchdog.probe import Peer
from collectives.worlds.watchdog.stacks import ProcessId

COVERS = ("collectives/worlds/watchdog/findings.py", "collectives/worlds/watchdog/watchdog.py")


class Exit(BaseException):
    """The end of this process."""


class World:
    """What a watchdog reads of its world."""

    def __init__(self, survives, kind):
        self.operation, self.begun, self.inside = Operation("a barrier", "", kind), 0, True
        self.survives, self.ends, self.threads = survives, [0.1 * n for n in range(100)], {}


class Watch:
    """Rank `own` of three, which waits in an operation from second 0 on; also the stand-in for its probe.

    Args:
      others: for each other rank a function that returns its state at a time, and more fields of the finding.

    Attributes:
      rounds: when the others were asked.
      events: when something was sent to others or asked of them, with what and to whom.
      reachable: ranks that can be killed.
      confirms: whether the rank that is to log a report confirms that.
    """

    def __init__(self, monkeypatch, others, *, own=0, survives=False, hang_timeout=60.0, kind=BARRIER):
        self.now, self.rounds, self.events, self.others_are = 0.0, [], [], others
        self.reachable, self.confirms, self.left = {0, 1, 2}, True, {}
        peers = [Peer(n, 0, ProcessId("h", 100 + n, 0.0, "", -1), (), b"", hang_timeout) for n in range(3)]
        self.me, self.others = peers[own], [peer for peer in peers if peer.number in others]
        self._over, self.world = threading.Event(), World(survives, kind)
        self.ring, self.greet, self.close = self._over.set, lambda: None, lambda: None
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(watchdog, "run_exit_hooks", lambda: self.events.append((self.now, "exit hooks")))
        monkeypatch.setattr(watchdog.os, "_exit", self._exit)
        self.dog = watchdog.Watchdog(self.world, self, hang_timeout, lambda code: self._add("abort", code))

    def _exit(self, code):
        self._add("exit", code)
        raise Exit

    def _add(self, *event):
        self.events.append((self.now, *event))

    def until(self, seconds, tick=1.0):
        """Let so many seconds pass. Returns the events."""
        while self.now < seconds:
            self.now += tick
            self.dog._check()
        return self.events

    # --- the probe ----------------------------------------------------------------------------------------------------

    def serve(self, seconds, here, until):
        if threading.current_thread() is not threading.main_thread():
            self._over.wait()

    def find(self, seconds, here, again):
        self.rounds.append(self.now)
        found = {}
        for number, state in self.others_are.items():
            name, fields = state(self.now), {}
            if isinstance(name, tuple):
                name, fields = name
            process = next(peer.process for peer in self.others if peer.number == number)
            found[number] = RankFinding(number, process, RankState[name], **fields)
        return found

    def helper(self, number, runs):
        return number if number in self.reachable else None

    def request(self, helper, what, number, here):
        self._add(what, number)

    def request_report(self, by, seconds, here, **fields):
        self._add("report", by, fields["level"])
        return self.confirms

    def send(self, to, kind, **fields):
        if kind != "report" and (not self.events or self.events[-1] != (self.now, kind, to)):  # sent several times
            self._add(kind, to)

    def rank(self, number):
        return number


@pytest.fixture
def watch(monkeypatch):
    """Make a `Watch`."""
    made = []

    def make(others, **options):
        made.append(Watch(monkeypatch, others, **options))
        return made[-1]

    yield make
    for each in made:
        each.dog.close()


def always(name, **fields):
    """A rank whose state does not change."""
    return lambda now: (name, fields)


def logged(caplog):
    """Return the levels and the last lines of what was logged."""
    return [(record.levelname, record.getMessage().splitlines()[-1]) for record in caplog.records]


HERE = always("HERE")


@pytest.mark.parametrize("state", ["AWAY", "CROSSED", "SILENT", "STOPPED", "TRACED", "CUT_OFF"])
def test_a_late_rank_is_reported_and_then_ends_the_job(watch, caplog, state):
    watching = watch({1: HERE, 2: always(state)})
    assert watching.until(119.0) == []
    assert logged(caplog) == [(
        "ERROR", "Unless rank 2 comes, the job ends when that is 120 s. "
        "hang_timeout= of comm.world() sets the time (60 s; 0: no limit)."
    )]  # fmt: skip
    assert re.match(r"rank 0 has waited for 60 s in a barrier.*:\n    rank 2 \(h, pid 102\)", caplog.messages[0])
    with pytest.raises(Exit):
        watching.until(120.0)
    kills = [] if state in ("AWAY", "CROSSED") else [("kill", 2)]  # others end by themselves
    assert [event[1:] for event in watching.events[: len(kills) + 1]] == [*kills, ("stop", [1, 2])]
    assert {event[1:] for event in watching.events[-3:]} == {("exit hooks",), ("abort", 1), ("exit", 1)}
    assert logged(caplog)[1:] == [("ERROR", "The job ends because of rank 2.")]


@pytest.mark.parametrize("state", ["AWAY", "SILENT", "GONE"])
def test_a_late_rank_is_killed_if_the_others_survive_that(watch, caplog, state):
    watching = watch({1: HERE, 2: always(state)}, survives=True)
    assert watching.until(119.0) == []
    assert "Unless rank 2 comes, rank 2 will be killed when that is 120 s. " in caplog.text
    assert watching.until(179.0)[0] == (120.0, "kill", 2)
    assert {event[1:] for event in watching.events} == {("kill", 2)}
    assert logged(caplog)[-1] == ("ERROR", "rank 2: killed, and lost.")
    with pytest.raises(Exit):
        watching.until(240.0)  # that has not helped
    assert logged(caplog)[-1] == ("ERROR", "The job ends because of rank 2.")


@pytest.mark.parametrize(("states", "reachable"), [
    (["AWAY", "AWAY"], {1}),  # one of them cannot be killed
    (["CROSSED", "CROSSED"], {1, 2}),  # that would not help
])  # fmt: skip
def test_without_a_kill_that_helps_the_job_ends(watch, states, reachable):
    watching = watch({1: always(states[0]), 2: always(states[1])}, survives=True)
    watching.reachable = reachable
    assert watching.until(119.0) == []
    with pytest.raises(Exit):
        watching.until(120.0)


def test_ranks_in_another_worlds_collective_wait_for_others(watch):
    watching = watch({1: always("CROSSED"), 2: always("AWAY")}, survives=True)
    assert {event[1:] for event in watching.until(130.0)} == {("kill", 2)}


@pytest.mark.parametrize(("state", "survives", "ends"), [
    ("ENDED", False, True),
    ("ENDED", True, False),
    ("GONE", False, True),
    ("GONE", True, None),
    ("AWAY", False, None),
])  # fmt: skip
def test_ranks_that_will_never_come_are_not_waited_for(watch, state, survives, ends):
    """Either the job ends with them at the first look, or they are killed."""
    watching = watch({1: HERE, 2: always(state)}, survives=survives)
    if ends:
        with pytest.raises(Exit):
            watching.until(59.0)
    else:
        assert [event[1:] for event in watching.until(59.0)] == [("kill", 2)] * (ends is False)


def test_ranks_that_have_announced_to_leave_are_looked_at_early(watch):
    watching = watch({1: HERE, 2: always("ENDED")}, survives=True)
    watching.left = {2: "its script is over"}
    watching.until(6.0)
    assert watching.rounds == [5.0]
    watching.until(12.0)
    assert watching.rounds == [5.0]  # but once


@pytest.mark.parametrize(("state", "kind", "says"), [
    ("HERE", BARRIER, "As far as is known, all ranks are in it; its messages are slow, or were lost."),
    ("COMPILES", BARRIER, "As far as is known, no rank is stuck."),
    ("UNKNOWN", BARRIER, "As far as is known, no rank is stuck."),
    ("AWAY", CLOSE, "As far as is known, no rank is stuck."),
    ("CROSSED", CLOSE, "As far as is known, no rank is stuck."),
])  # fmt: skip
def test_ranks_that_may_be_late_are_waited_for(watch, caplog, state, kind, says):
    watching = watch({1: HERE, 2: always(state)}, kind=kind)
    assert watching.until(59.0) == []
    assert logged(caplog) == []
    watching.until(60.0)
    assert logged(caplog) == [("WARNING", says)]
    assert watching.until(300.0) == []
    assert logged(caplog) == [("WARNING", says)]


def test_time_counts_since_a_rank_was_well(watch, caplog):
    watching = watch({1: HERE, 2: lambda now: "COMPILES" if now < 100 else "AWAY"})
    watching.until(150.0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    watching.until(180.0)
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    with pytest.raises(Exit):
        watching.until(260.0)
    assert watching.now > 210


def test_waits_for_a_core_do_not_count(watch, caplog):
    half = lambda now: ("AWAY", {"core_time": CoreTime(0.0, max(0.0, now - 30.0) / 2, False)})  # noqa: E731
    watching = watch({1: HERE, 2: half})
    watching.until(89.0)
    assert logged(caplog) == [("WARNING", "As far as is known, no rank is stuck.")]
    watching.until(110.0)
    assert "that is 120 s, without waits for a core. " in caplog.text
    assert "It waited for a core for 7.5 s of the last 15 s, which does not count" in caplog.text


def test_another_operation_is_waited_for_anew(watch):
    watching = watch({1: HERE, 2: always("AWAY")})
    for _ in range(3):
        watching.until(watching.now + 50.0)
        watching.world.begun += 1
    watching.world.inside = False
    assert watching.until(500.0) == []
    assert watching.dog._own_state()["seconds"] > 100
    watching.world.inside = True
    watching.dog.keep = watching.keep = lambda peers: None
    watching.until(555.0)
    watching.dog.watch_only([])
    watching.until(610.0)
    assert watching.events == []


def test_seconds_for_which_this_process_was_stopped_do_not_count(watch):
    watching = watch({1: HERE, 2: always("AWAY")})
    assert watching.until(1000.0, tick=1000.0) == []
    assert watching.until(1019.0) == []
    assert watching.rounds == []


# --- ranks that do nothing --------------------------------------------------------------------------------------------

SLEEPS = {"doing": IN_A_STEP, "core_time": CoreTime(1.0, 0.0, False)}


@pytest.mark.parametrize("seconds", [0.01, 0.5])
@pytest.mark.parametrize("fields", [("STOPPED", {}), ("AWAY", SLEEPS)])
def test_by_default_a_rank_that_does_nothing_is_killed_early(watch, caplog, fields, seconds):
    """The limit is ten times that of an operation, and at least two seconds."""
    watching = watch({1: HERE, 2: lambda now: fields}, survives=True, hang_timeout=None)
    watching.world.ends = [seconds * n for n in range(100)]
    limit = max(2.0, 10 * seconds)
    assert watching.until(2 * limit - 0.25, tick=0.25) == []
    assert {event[1:] for event in watching.until(3 * limit, tick=0.25)} == {("kill", 2)}
    assert f"Unless rank 2 comes, rank 2 will be killed when that is {2 * limit:g} s. By default" in caplog.text


def test_a_rank_must_have_done_nothing_for_as_long_as_the_limit(watch, caplog):
    fields = lambda now: "STOPPED" if now > 30.0 else ("AWAY", {"doing": "in evaluate"})  # noqa: E731
    watching = watch({1: HERE, 2: fields}, survives=True, hang_timeout=None)
    while not any(seconds > 30.0 for seconds in watching.rounds):
        assert watching.until(watching.now + 0.25, tick=0.25) == []
    assert logged(caplog) == []  # a single look may be a coincidence
    assert {event[1:] for event in watching.until(58.0, tick=0.25)} == {("kill", 2)}


@pytest.mark.parametrize(("fields", "survives"), [
    (("AWAY", {**SLEEPS, "doing": "in evaluate"}), True),
    (("AWAY", {"doing": IN_A_STEP}), True),  # whether it sleeps is unknown
    (("SILENT", SLEEPS), True),
    (("STOPPED", {}), False),
])  # fmt: skip
def test_others_have_a_minute_before_they_are_killed(watch, caplog, fields, survives):
    watching = watch({1: HERE, 2: lambda now: fields}, survives=survives, hang_timeout=None)
    assert watching.until(59.0, tick=0.25) == []
    assert bool(logged(caplog)) == (fields[0] == "STOPPED")  # reported only
    assert "job ends when that is 120 s" in caplog.text or not caplog.text


# --- who logs a report ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("own", "confirms", "level"), [(0, True, "ERROR"), (1, True, "INFO"), (1, False, "ERROR")])
def test_the_least_rank_that_waits_logs_the_report(watch, caplog, own, confirms, level):
    caplog.set_level(logging.INFO)
    watching = watch({1 - own: HERE, 2: always("SILENT")}, own=own)
    watching.confirms = confirms
    assert watching.until(70.0) == ([(60.0, "report", 0, logging.ERROR)] if own else [])
    assert [record.levelname for record in caplog.records] == [level]


def test_a_report_of_another_rank_is_logged_once(watch, caplog):
    caplog.set_level(logging.INFO)
    watching = watch({0: HERE, 2: always("SILENT")}, own=1)
    said = {"kind": "report", "from": 0, "about": [2], "level": logging.ERROR, "text": "rank 2 is late"}
    watching.dog._handle({**said, "speaker": 1})
    watching.dog._handle({**said, "speaker": 1})
    watching.dog._handle({**said, "speaker": 0, "from": 2, "level": logging.CRITICAL})
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("ERROR", "rank 2 is late"),
        ("INFO", "rank 2 is late"),
    ]
    assert [event[1:] for event in watching.events] == [("heard", [0])]
    watching.until(70.0)
    assert len(caplog.records) == 2


def test_a_rank_that_was_asked_need_not_ask(watch):
    watching = watch({1: HERE, 2: always("AWAY")})
    watching.until(20.0)
    watching.dog._handle({"kind": "ask", "from": 1, "question": 3, "again": 25.0})
    assert watching.events.pop()[1:] == ("answer", [1])
    watching.until(46.0)
    assert watching.rounds == []
    watching.until(48.0)
    assert watching.rounds == [47.0]


@pytest.mark.parametrize("because_of", [[0], [2]])
def test_a_process_ends_when_another_one_ends_the_job(watch, caplog, because_of):
    watching = watch({1: HERE, 2: HERE})
    with pytest.raises(Exit):
        watching.dog._handle({"kind": "stop", "because_of": because_of, "about": "step 3", "waited": 120.0})
    assert ("they waited for it for 120 s in step 3" in caplog.text) == (because_of == [0])
    assert "how long the others wait (60 s)" in caplog.text or because_of == [2]


# --- what others learn of this rank -----------------------------------------------------------------------------------


def test_the_state_of_a_rank_is_that_of_its_threads(watch, monkeypatch):
    watching = watch({1: HERE, 2: HERE})
    own = watching.dog._own_state
    watching.world.threads = {threading.get_ident(): "main"}

    in_a_step, compiles, exchanges = (
        thread_status(IN_A_STEP)(lambda: watching.dog._own_state()),
        thread_status("compiling", compiles=True)(lambda: watching.dog._own_state()),
        thread_status("in a collective", exchanges=True)(lambda: watching.dog._own_state()),
    )
    assert own()["state"] == "HERE"
    watching.world.inside = False
    away = in_a_step()
    assert (away["state"], away["doing"]) == ("AWAY", IN_A_STEP)
    assert "test_the_state_of_a_rank" in away["stack"]
    assert compiles()["state"] == "COMPILES"
    crossed = exchanges()
    assert (crossed["state"], crossed["line"][:17]) == ("CROSSED", "test_deadlines.py")
    wait = SimpleNamespace(words=lambda: "waits for a file", stack=lambda: "the stack of its reader")
    with monkeypatch.context() as patch:
        patch.setattr(watchdog, "wait_of", {threading.get_ident(): wait}.get)
        away = in_a_step()
    assert (away["doing"], away["stack"]) == (f"{IN_A_STEP}; waits for a file", "the stack of its reader")
    done = threading.Event()
    other = threading.Thread(target=thread_status("in evaluate")(lambda: done.wait()))
    other.start()
    watching.world.threads[other.ident] = "other"
    both = exchanges()
    done.set()
    other.join()
    assert (both["state"], both["doing"]) == ("AWAY", "in a collective; in evaluate")
    watching.world.inside = True
    assert {key: own()[key] for key in ("stack", "core_time")} == {"stack": "", "core_time": None}


@pytest.mark.parametrize(("error", "words"), [
    (None, "its script is over, at its end, or by sys.exit(). The last that it took part in is a barrier"),
    (ValueError("no"), "its script is over, by ValueError: no. The last that it took part in is a barrier"),
])  # fmt: skip
def test_others_learn_why_a_process_leaves(watch, monkeypatch, error, words):
    watching, said = watch({1: HERE, 2: HERE}), []
    monkeypatch.setattr(watching, "send", lambda to, kind, **fields: said.append((*to, kind, fields["why"])))
    monkeypatch.setattr(sys, "last_exc", error, raising=False)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    watching.dog._at_exit()
    watching.dog.close("again")
    assert set(said) == {(1, 2, "bye", words)}
    assert not watching.dog._thread.is_alive()
