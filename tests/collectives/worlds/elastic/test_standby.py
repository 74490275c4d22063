"""Control messages after losses, with a stand-in for MPI."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from collectives.worlds.elastic.standby import ControlMessages


class Comm:
    """A communicator of four processes with a message of rank 1; rank 2 has died.

    Args:
      errors: how often MPI reports that loss, unless it is acknowledged.
    """

    group = None

    def __init__(self, errors=0):
        self.errors, self.acknowledged, self.groups = errors, 0, 0

    def Iprobe(self, _source, _tag, status):
        if self.errors > self.acknowledged:
            raise OSError("rank 2 has died")
        status.source = 1
        return True

    def recv(self, source, tag):
        return "a word", source

    def isend(self, message, rank, tag):
        if rank == 2:
            raise OSError("rank 2 has died")
        return rank

    def Ack_failed(self):
        self.acknowledged += 1

    def Get_failed(self):
        self.groups += 1
        return SimpleNamespace(size=1, Translate_ranks=lambda ranks, group: [2], Free=self.free)

    def free(self):
        self.groups -= 1


def messages_in(comm):
    return ControlMessages(SimpleNamespace(Status=SimpleNamespace, ANY_SOURCE=-1, Exception=OSError), comm)


@pytest.mark.parametrize(("errors", "received"), [(0, ("a word", 1, 1)), (1, ("a word", 1, 1)), (9, None)])
def test_messages_arrive_although_another_process_has_died(errors, received):
    assert messages_in(Comm(errors)).receive() == received


def test_messages_to_dead_processes_are_dropped():
    messages = messages_in(Comm())
    messages.send([1, 2, 3], "a word")
    assert messages._sent == [1, 3]


def test_only_the_dead_of_some_ranks_are_named_if_mpi_knows_them():
    comm = Comm()
    messages = messages_in(comm)
    assert (messages.dead([1, 2]), messages.dead([1, 3])) == ({2}, set())
    assert comm.groups == 0  # none is left in MPI's memory
    comm.Get_failed = lambda: SimpleNamespace(size=0)
    assert messages.dead([1, 2]) == set()
    for error in (OSError, NotImplementedError):

        def fails(error=error):
            raise error

        comm.Get_failed = fails
        assert messages.dead([1, 2]) == set()
