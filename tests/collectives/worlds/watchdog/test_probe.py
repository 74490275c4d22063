"""What a rank asks of others, and how it answers them; datagrams are made up."""

from __future__ import annotations

import os

import pytest

from collectives.worlds.watchdog import probe as probes
from collectives.worlds.watchdog import stacks
from collectives.worlds.watchdog.core_time import CoreTime
from collectives.worlds.watchdog.probe import Peer, Probe
from collectives.worlds.watchdog.stacks import ProcessId


class Silence:
    """Datagrams without a receiver, kept in `sent`; those in `come` arrive."""

    def __init__(self):
        self.sent, self.come = [], []

    def join(self, key, own):
        pass

    def send(self, to, addresses, **fields):
        self.sent.append((to, list(addresses), fields))

    def receive(self, seconds):
        return self.come.pop(0) if self.come else None


@pytest.fixture
def probe(monkeypatch):
    """Rank 1 of four on two hosts: 0 and 1, 2 and 3."""
    monkeypatch.setattr("collectives.worlds.watchdog.probe._SECONDS_TO_DO", 0.01)
    process = ProcessId(*[os.getpid()] * len(ProcessId._fields))
    peers = [Peer(number, number // 2 * 2, process, ("here", "a", "b"), b"key", 60.0) for number in range(4)]
    made = Probe(peers, 1, Silence())
    made.datagrams = made._socket
    return made


def test_a_rank_of_this_host_is_looked_at_from_here(probe):
    assert probe.helper(0, set()) == 1
    assert probe.helper(0, {0, 2, 3}) == 1


def test_a_rank_of_another_host_is_looked_at_by_one_there_that_runs(probe):
    assert probe.helper(2, {0, 3}) == 3
    assert probe.helper(3, {0, 2}) == 2
    assert probe.helper(2, {0}) is None  # nobody there runs


def test_a_helper_that_does_not_say_how_it_went_is_not_waited_for(probe):
    assert probe.request(3, "look", 2, lambda message: None) is None
    assert probe.request_report(3, 0.01, lambda message: None, because_of=[2]) is False


def come(probe, kind, sender, **fields):
    """Let a datagram arrive."""
    probe.datagrams.come.append({"kind": kind, "from": sender, **fields})


def taken(probe):
    """Return what the probe has sent since the last call."""
    sent, probe.datagrams.sent = probe.datagrams.sent, []
    return sent


def ignored(message):
    """Handle requests of others."""


STATE = {"doing": "in evaluate", "line": "a.py:1", "seconds": 2.5, "stack": "", "core_time": [1.0, 2.0, True]}


def test_answers_are_findings_and_the_others_processes_are_looked_at(probe, monkeypatch):
    monkeypatch.setattr(stacks, "look_at", lambda process: (stacks.STOPPED, "a stack"))
    come(probe, "bye", 3, why="over")
    probe.serve(0.0, ignored, lambda: False)
    come(probe, "answer", 2, question=0, state="HERE", **STATE)  # to an earlier question
    come(probe, "answer", 2, question=1, state="AWAY", **STATE)
    come(probe, "answer", 3, question=1, state="HERE", **STATE)  # not asked
    found = probe.find(0.01, ignored, again=7.0)
    assert list(found) == [0, 2, 3]
    assert [finding.state.name for finding in found.values()] == ["STOPPED", "AWAY", "ENDED"]
    assert [finding.rank for finding in found.values()] == [0, 2, 3]
    away = found[2]
    assert (away.doing, away.line, away.seconds, away.core_time) == ("in evaluate", "a.py:1", 2.5, CoreTime(1, 2, True))
    assert (found[0].stack, found[3].doing) == ("a stack", "over")
    assert taken(probe) == [
        (to, addresses, {"kind": "ask", "question": 1, "again": 7.0})
        for to, addresses in [(0, ["here"]), (2, ["a", "b"]), (0, ["here"]), (0, ["here"])]
    ]


def test_ranks_are_asked_again_only_until_they_answer_this_question(probe):
    probe.keep([probe.me, *probe.others[1:]])
    probe.find(0.0, ignored)
    for question, number in ((1, 2), (2, 3)):
        come(probe, "answer", number, question=question, state="HERE", **STATE)
    probe.left[2] = ""
    assert probe.find(0.0, ignored)[3].state.name == "HERE"
    taken(probe)
    del probe.left[2]
    come(probe, "answer", 2, question=2, state="HERE", **STATE)
    come(probe, "answer", 3, question=3, state="AWAY", **STATE)
    assert [finding.state.name for finding in probe.find(0.0, ignored).values()] == ["SILENT", "AWAY"]
    for number in (2, 3):
        come(probe, "answer", number, question=4, state="HERE", **STATE)
    taken(probe)
    probe.find(0.0, ignored)
    assert [sent[0] for sent in taken(probe)] == [2, 3]


@pytest.mark.parametrize(("seen", "state"), [
    (stacks.GONE, "GONE"), (stacks.TRACED, "TRACED"), (stacks.RUNS, "SILENT"), (stacks.UNKNOWN, "SILENT"),
])  # fmt: skip
def test_a_process_that_does_not_answer_is_looked_at(probe, monkeypatch, seen, state):
    monkeypatch.setattr(stacks, "look_at", lambda process: (seen, ""))
    monkeypatch.setattr(probes, "core_time", lambda pid: CoreTime(1, 2, True))
    finding = probe.find(0.0, ignored)[0]
    assert finding.state.name == state
    assert finding.core_time == (CoreTime(1, 2, True) if seen == stacks.RUNS else None)
    come(probe, "look", 0, number=0)
    come(probe, "look", 0, number=2)  # of another host
    probe.serve(0.0, ignored, lambda: False)
    assert taken(probe)[-1][::2] == (0, {"kind": "done", "result": probe._do("look", 0)})


def test_a_rank_of_another_host_is_silent_only_where_another_one_there_says_so(probe):
    come(probe, "hello", 3)
    probe.serve(0.0, ignored, lambda: False)
    assert taken(probe) == [(3, ["a", "b"], {"kind": "welcome"})]

    def answer(probe_send=probe.send):
        def send(to, kind, **fields):
            if kind == "ask" and 3 in to:
                come(probe, "answer", 3, question=fields["question"], state="AWAY", **STATE)
            if kind == "look":
                come(probe, "done", 3, result=[stacks.RUNS, "its stack", [1.0, 2.0, False]])
            probe_send(to, kind, **fields)

        return send

    probe.send = answer()
    finding = probe.find(0.01, ignored)[2]
    assert (finding.state.name, finding.stack, finding.core_time) == ("SILENT", "its stack", CoreTime(1, 2, False))


def test_hosts_that_were_not_reached_are_greeted_a_few_times(probe):
    probe.greet()
    assert taken(probe) == [(2, ["a", "b"], {"kind": "hello"})]  # one rank of each
    for _ in range(20):
        probe.greet()
    assert 1 < len(taken(probe)) < 20
    probe._hellos = 1
    come(probe, "welcome", 2)
    probe.serve(0.0, ignored, lambda: False)
    probe.greet()
    assert taken(probe) == []


def test_a_report_is_confirmed_by_the_rank_that_logs_it(probe):
    come(probe, "heard", 0)
    probe.serve(0.0, ignored, lambda: False)  # an earlier one
    assert probe.request_report(0, 0.01, ignored, text="late") is False
    come(probe, "hello", 2)
    come(probe, "heard", 2)
    come(probe, "heard", 0)
    taken(probe)
    assert probe.request_report(0, 1.0, ignored, text="late") is True
    assert taken(probe)[0] == (0, ["here"], {"kind": "report", "text": "late"})


def test_requests_of_ranks_that_were_given_up_are_ignored_except_for_the_end(probe):
    probe.keep([probe.me, *probe.others[1:]])
    heard = []
    for sender in (0, 2, 9):
        for kind in ("ask", "stop"):
            come(probe, kind, sender)
    probe.serve(0.0, heard.append, lambda: False)
    assert [(message["kind"], message["from"]) for message in heard] == [("stop", 0), ("ask", 2), ("stop", 2)]
