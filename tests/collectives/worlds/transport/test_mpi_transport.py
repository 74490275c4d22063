"""Operations of MPI processes that are threads of this one: if some die, the others complete them or none does."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from adaptive import CollectiveError, DisagreementError, WorkerError
from adaptive.base.channel import PartSpec
from adaptive.base.world import MembersChanged
from collectives.worlds.transport.mpi_channel import ReduceByMPI
from collectives.worlds.transport.operations import CLOSE, GatherBytes, Operation
from tests.collectives.worlds.mpi_of_threads import MPI, Job, transport_of

# --- losses -----------------------------------------------------------------------------------------------------------


def message(transport, number):
    """Sum 1, and the process's number, over all processes."""
    sent = ReduceByMPI(transport, [PartSpec((500,), np.dtype(float), "sum")], 0)
    sent.about, sent.sent = f"message {number}", [np.resize([1.0, 10.0**transport.comm.number], 500)]
    transport.run(sent)
    assert sent.buffers[0][2:].tolist() == sent.buffers[0][:-2].tolist()
    return sent.buffers[0][:2].tolist()


def script(comm):
    """Return what came of each operation, and what was lost when."""
    transport, found = transport_of(comm), []
    uses = [
        lambda: message(transport, 1),
        lambda: transport.all_gather_bytes(b"%d" % comm.number, "gathering"),
        lambda: message(transport, 2),
        transport.barrier,
        lambda: message(transport, 3),
        transport.barrier,
    ]
    for use in uses:
        try:
            found.append(use())
        except MembersChanged:
            found.append("changed")
        assert not transport.inside
        assert not transport.lock.locked()
    return found, transport.losses, transport.rank, transport.processes


CALLS = 2 + 2 + 2 + 1 + 2 + 1  # of MPI


def members(result, size):
    """Return who has taken part in a message or a gathering."""
    if isinstance(result[0], bytes):
        return {int(value) for value in result}
    found = {number for number in range(size) if int(result[1]) // 10**number % 10}
    assert result == [len(found), sum(10.0**number for number in found)]
    return found


@pytest.mark.parametrize(
    ("dies", "fails"),
    [
        *(({1: call}, {}) for call in range(CALLS)),
        *(({1: call}, {number: call - 1}) for call in range(1, CALLS) for number in (0, 2)),
        *(({1: call, 3: call + later}, {}) for call in range(CALLS) for later in (0, 1, 2)),  # also in the repair
        *(({1: call, 3: call + 2}, {0: call - 1}) for call in range(1, CALLS)),
    ],
)
def test_survivors_complete_the_same_operations_wherever_processes_die(dies, fails):
    """Also where one of them has not received what the others have."""
    size = 2 + len(dies)
    results = Job(size, dies=dies, fails=fails).run(script)
    first, third = results[0], results[2]
    assert [number for number, result in enumerate(results) if result is None] == [*dies]
    assert first[:2] == third[:2]
    assert (first[2:], third[2:]) == ((0, 2), (1, 2))
    found, losses = first[:2]
    assert sorted(number for numbers, _ in losses for number in numbers) == [*dies]
    assert found[3] is found[5] is None
    took_part = [members(result, size) for result in found if result not in (None, "changed")]
    assert all({0, 2} <= later <= before for before, later in itertools.pairwise([{*range(size)}, *took_part]))
    assert found.count("changed") <= len(losses)


def test_a_message_that_another_process_completed_arrives_everywhere():
    """Process 2 is interrupted in message 1, which process 0 has received; process 1 dies right after it."""
    (found, losses, *_), _, (others, *_) = Job(3, dies={1: 2}, fails={2: 1}).run(script)
    assert found[:3] == others[:3] == [[3.0, 111.0], [b"0", b"2"], [2.0, 101.0]]
    assert losses == [([1], "gathering")] or losses == [([1], "message 1")]


@pytest.mark.parametrize("use", [message, lambda transport, number: transport.all_gather_bytes(b"", f"{number}")])
@pytest.mark.parametrize("survives", [False, True])
def test_an_error_without_a_loss_is_an_error_on_all(survives, use):
    def work(comm):
        transport = transport_of(comm, survives=survives)
        with pytest.raises(WorkerError, match=rf"rank {comm.rank} of 2: MPI failed \(a process is lost\)"):
            [use(transport, number) for number in range(9)]
        assert not transport.losses
        return comm.shared.revoked

    job = Job(2, fails={0: 2})
    if not survives:  # the launcher ends the others
        job.dies = {1: 3}
    assert job.run(work) == ([True, True] if survives else [False, None])


# --- disagreements and failures ---------------------------------------------------------------------------------------


class Watchdog:
    def __init__(self):
        self.closed, self.watched = False, []

    def close(self):
        self.closed = True

    def watch(self, world, everyone, rank):
        self.watched.append((world, everyone, rank))


@pytest.mark.parametrize(("leaves", "another_world"), [(False, False), (True, False), (True, True)])
def test_a_disagreement_is_raised_by_all_and_only_a_process_that_leaves_closes_the_world(leaves, another_world):
    """And only the world that it leaves."""

    def use(comm):
        transport = transport_of(comm)
        transport.watchdog = watchdog = Watchdog()
        transport.world = "world 2" if another_world and comm.rank else "world 1"
        other = Operation("the end", "", CLOSE, is_final=True) if leaves else Operation("another", "", 7)
        with pytest.raises(DisagreementError, match="rank 0: gathering") as e:
            transport.run(other if comm.rank else GatherBytes(b"", "gathering", ""))
        assert ("rank 1: the end" if leaves else "rank 1: another") in str(e.value)
        assert ("in world 2" in str(e.value)) is another_world
        assert not transport.torn
        closed, transport.lifetime.closed, transport.world = transport.lifetime.closed, False, "world 1"
        transport.barrier()
        return closed, watchdog.closed

    assert Job(2).run(use) == [(leaves and not another_world,) * 2, (leaves,) * 2]


@pytest.mark.parametrize(
    ("level", "main", "is_refused"),
    [(MPI.THREAD_MULTIPLE, False, False), (MPI.THREAD_SERIALIZED, True, False), (MPI.THREAD_SERIALIZED, False, True)],
)
def test_threads_are_let_in_as_mpi_allows(level, main, is_refused, monkeypatch):
    monkeypatch.setattr(MPI, "Query_thread", lambda: level)
    monkeypatch.setattr(MPI, "Is_thread_main", lambda: main)

    def use(comm):
        transport = transport_of(comm)
        if is_refused:
            with pytest.raises(CollectiveError, match="initialized for one thread at a time"):
                transport.barrier()
        else:
            transport.barrier()
        return list(transport.threads) == [threading.get_ident()] * (not is_refused)

    assert Job(1).run(use) == [True]
