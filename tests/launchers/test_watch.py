"""The launcher's rounds: whom it asks, when it judges, and whom it has killed. The parents of ranks are made up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from launchers import watch as watching
from launchers.activity import INSIDE, OUTSIDE, ActivityReading
from launchers.inspection import RUNS
from launchers.verdict import ProcessState
from launchers.watch import Watch
from tests.speed import limit


class Job:
    """Two ranks, with a parent each.

    Attributes:
      silent: ranks whose parents do not answer.
      killed: the pids that parents were asked to kill.
      looked: the details that were asked for, by round.
    """

    def __init__(self, survives=True):
        self.ranks = [ProcessState("job", rank, 2, "h", 100 + rank) for rank in range(2)]
        self.phases = [INSIDE] * 2
        self.survives, self.silent, self.waited = survives, set(), 0.0
        self.killed, self.looked, self.ended = [], [], False
        self.then = lambda rounds: None  # called after each round
        self.watch = Watch(self.ranks, lambda process, line: self._receive(process.rank, line), self._end)

    def _end(self):
        self.ended = True
        self.watch.stop()

    def _receive(self, rank, line):
        match line.split():
            case ["look", number, detailed]:
                if rank == 0:
                    self.looked.append(detailed == "1")
                    self.waited += 0.5
                    self.then(len(self.looked))
                if rank not in self.silent:
                    asyncio.get_running_loop().call_soon(self._reply, rank, int(number))
            case ["kill", pid]:
                self.killed.append(int(pid))
                self.ranks[int(pid) - 100].connected = False

    def _reply(self, rank, number):
        phase = self.phases[rank]
        reading = ActivityReading(5, self.survives, 2.0, phase, 9, self.waited, "message 1", None)
        said = {"pid": 100 + rank, "worlds": [list(reading)], "state": RUNS}
        said |= {"core_time": None, "answers": {}, "stack": "in a loop", "asked": phase == OUTSIDE}
        self.watch.note_look(self.ranks[rank], {"look": number, **said})

    def play(self, monkeypatch, rounds=40):
        """Begin with rank 0's report that it waits, and let so many rounds happen. Returns the printed text."""
        monkeypatch.setattr(watching, "REPLY_SECONDS", 0.01)
        monkeypatch.setattr(watching.GroupWait, "next_round", 0.0)
        monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: self.waited))

        async def scene():
            self.watch.note_wait()
            async with asyncio.timeout(limit(20)):
                while len(self.looked) < rounds and not self.ended and self.watch._timer is not None:
                    await asyncio.sleep(0.001)
            self.watch.stop()

        asyncio.run(scene())


def test_a_stuck_rank_is_reported_and_killed_by_its_parent(monkeypatch, capsys):
    job = Job()
    job.phases[1] = OUTSIDE
    job.play(monkeypatch)
    assert job.killed == [101]
    assert not job.ended
    said = capsys.readouterr().err
    assert said.count("adaptive run: rank 0 (pid 100 on h) has waited for 2.0 s in message 1:") == 1
    assert said.count("rank 1: killed, and lost.") == 1
    assert job.looked[:4] == [False, False, True, True]  # ranks are asked after a while


@pytest.mark.parametrize("since", [0, 2])  # rounds
def test_a_rank_whose_parent_does_not_answer_ends_the_job(since, monkeypatch):
    job = Job()
    job.phases[1] = OUTSIDE
    job.silent = set() if since else {1}
    job.ranks[1].worlds = 1
    job.then = lambda rounds: rounds >= since and job.silent.add(1)
    job.play(monkeypatch)
    assert (job.killed, job.ended) == ([], True)


@pytest.mark.parametrize("survives", [False, True])
def test_a_rank_that_has_ended_is_waited_for_in_vain(survives, monkeypatch, capsys):
    """MPI itself tells the others if they can continue."""
    job = Job(survives=survives)
    job.then = lambda rounds: setattr(job.ranks[1], "connected", rounds < 2)
    job.play(monkeypatch)
    assert job.ended is not survives
    assert ("rank 1 (pid 101 on h) has ended" in capsys.readouterr().err) is not survives


def test_nobody_is_looked_at_when_no_rank_waits(monkeypatch):
    job = Job()
    job.phases = [OUTSIDE, OUTSIDE]
    job.play(monkeypatch)
    job.watch.note_wait()  # after the end of the watch
    assert len(job.looked) == 1
