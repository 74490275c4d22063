"""Which way is taken: by times alone that all ranks have, so all ranks say the same."""

from __future__ import annotations

import numpy as np
import pytest

from collectives.worlds.reducing.algorithms import Algorithms, multi_host_algorithms
from collectives.worlds.reducing.autotune import KEPT, MESSAGES, TRIALS, Autotuner
from collectives.worlds.reducing.hierarchical import HierarchicalSum
from collectives.worlds.transport.operations import ReduceMessage
from collectives.worlds.transport.process_group import Process, ProcessGroup

COVERS = ("collectives/worlds/reducing/algorithms.py",)


def send(choices: list[Autotuner], seconds: list[list[float]], n: int, about: str = "a message") -> list[int]:
    """So many messages, which take each rank so long, by its number and the way's. Returns the ways they went."""
    went = []
    for _ in range(n):
        (way,) = {choice.choice for choice in choices}
        went.append(way)
        for rank, choice in enumerate(choices):
            choice.record(seconds[rank][way])
        due = [choice.due for choice in choices]
        assert len({times is None for times in due}) == 1
        if due[0] is not None:
            slowest = np.max(due, axis=0)
            for choice in choices:
                choice.compare(slowest.copy(), about)
    return went


def test_the_slowest_rank_decides():
    """Each rank by itself would go another way."""
    choices = [Autotuner(2), Autotuner(2)]
    seconds = [[1.0, 2.0], [4.0, 3.0]]
    assert send(choices, seconds, TRIALS * 2 + 5, "message 6") == [0, 1] * TRIALS + [1] * 5
    assert {choice.seconds for choice in choices} == {(4.0, 3.0)}
    assert choices[0].about == "message 6"


def test_a_single_outlier_does_not_count():
    choice = Autotuner(2)
    for seconds in (9.0, 1.0, 2.0, 9.0, 3.0, 9.0):  # by turns of the two ways
        choice.record(seconds)
    assert choice.due is not None
    choice.compare(choice.due, "")
    assert choice.seconds == (2.0, 1.0)


@pytest.mark.parametrize(("factor", "anew"), [(1.4, False), (1.6, True), (0.8, False), (0.6, True)])
def test_algorithms_are_measured_again_when_times_change(factor, anew):
    choices = [Autotuner(2), Autotuner(2)]
    send(choices, [[1.0, 2.0]] * 2, 2 * TRIALS)
    assert send(choices, [[factor, 2.0]] * 2, MESSAGES) == [0] * MESSAGES
    went = send(choices, [[factor, 0.5 * factor]] * 2, 2 * TRIALS + 1)
    assert went == ([0, 1] * TRIALS + [1] if anew else [0] * (2 * TRIALS + 1))


def test_one_slow_message_changes_nothing():
    choices = [Autotuner(2)]
    send(choices, [[1.0, 2.0]], 2 * TRIALS)
    send(choices, [[50.0, 2.0]], MESSAGES - 1)
    send(choices, [[1.0, 2.0]], 1)
    assert choices[0].choice == 0
    assert choices[0].seconds is not None


# --- of a communicator ------------------------------------------------------------------------------------------------


class FakeComm:
    """One of several ranks, alone."""

    rank = 0

    def Allreduce(self, sent, received, *op):
        """The others are as fast."""


class FakeMPI:
    IN_PLACE = MAX = None


def together(*hosts: int) -> ProcessGroup:
    return ProcessGroup(FakeComm(), tuple(Process(range(i, i + 1), "node", host, i) for i, host in enumerate(hosts)))


@pytest.mark.parametrize(
    ("hosts", "several"), [([0], False), ([0, 0], False), ([0, 1], False), ([0, 1, 1], True), ([2, 4, 2, 4], True)]
)
def test_there_are_several_ways_where_one_of_several_hosts_has_several_ranks(hosts, several):
    assert (multi_host_algorithms(FakeMPI, together(*hosts), survives=False) is not None) == several


def begun(ways: Algorithms, channel: int) -> ReduceMessage:
    message = ReduceMessage("a message", "", 0, buffers=[], status=np.zeros(0), reduce=lambda: np.full(1, 5.0))
    ways.begin_message(message, (channel, 1), fixed=False)
    assert message.agreed == ways.hierarchical
    return message


def test_each_message_has_its_own_algorithm_and_few_are_kept(monkeypatch):
    made = []
    monkeypatch.setattr(
        "collectives.worlds.reducing.algorithms.HierarchicalSum", lambda *_, **__: made.append(HierarchicalSum)
    )
    ways = Algorithms(FakeMPI, together(0, 0, 1, 1), survives=False)
    last = 2 * KEPT - 1
    for channel in range(last + 1):
        message = begun(ways, channel)
        assert not ways.hierarchical
        message.carry_out(None)
        assert message.arrived == 5
    assert not made  # for whom all goes flat
    assert ways.describe(0) == ""
    assert "in turn" in ways.describe(last)
    for _ in range(2):  # what is begun and not carried out, since others mean something else, is as if it had not been
        begun(ways, -1)
        assert not ways.hierarchical
        begun(ways, last)
        assert ways.hierarchical
    assert ways.describe(-1) == ""
