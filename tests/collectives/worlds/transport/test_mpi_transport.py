"""Operations of MPI processes that are threads of this one: if some die, the others complete them or none does."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from adaptive import CollectiveError, DisagreementError, WorkerError
from adaptive.extend import MembersChanged
from collectives.worlds.lifetime import Lifetime
from collectives.worlds.reducing.algorithms import FLAT_PIECE_BYTES
from collectives.worlds.transport.mpi_transport import PIECE_BYTES, MPITransport
from collectives.worlds.transport.operations import CLOSE, FinalOperation, GatherBytes, Operation, ReduceMessage
from collectives.worlds.transport.process_group import Process, ProcessGroup
from tests.speed import limit

COVERS = (
    "collectives/worlds/transport/process_group.py",
    "collectives/worlds/transport/repair.py",
    "collectives/worlds/transport/transport.py",
)


class MPIError(Exception):
    """An error of MPI."""

    def Get_error_string(self):
        return "a process is lost"


class MPI:
    """The used part of `mpi4py.MPI`."""

    IN_PLACE, UNDEFINED, COMM_NULL, ERRORS_RETURN, ERR_PROC_FAILED = "in place", -1, None, "return", 75
    SUM, MAX, MIN = np.add, np.maximum, np.minimum
    THREAD_SERIALIZED, THREAD_MULTIPLE = 2, 3
    Exception = MPIError
    Request = SimpleNamespace(Waitall=lambda requests: [request.Wait() for request in requests])
    Query_thread = staticmethod(lambda: MPI.THREAD_MULTIPLE)
    Is_thread_main = staticmethod(lambda: True)


class Killed(BaseException):
    """This process is dead."""


class Job:
    """Processes that are threads.

    Args:
      dies: for each process that dies, at which of its collectives; the others do not get its values there.
      fails: for each process that an error of MPI interrupts, in which of its collectives; the others complete it.
    """

    def __init__(self, size, dies=None, fails=None):
        self.size, self.dies, self.fails = size, dies or {}, fails or {}
        self.changed, self.given, self.calls = threading.Condition(), defaultdict(dict), defaultdict(int)
        self.dead, self.revoked, self.mail = set(), set(), defaultdict(deque)

    def run(self, script, *each):
        """Return what `script(comm, ...)` returns on each process; None for those that die."""

        def process(number, *own):
            try:
                return script(Comm(self, number, range(self.size)), *own)
            except Killed:
                return None

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(process, range(self.size), *each))

    def die(self, number):
        """Called on the process of this number."""
        with self.changed:
            self.dead.add(number)
            self.changed.notify_all()
        raise Killed


class Group(tuple):
    """Processes, by rank."""

    def Translate_ranks(self, ranks, other):
        return [other.index(self[rank]) for rank in ranks]


class Comm:
    """The communicator of one process."""

    def __init__(self, job, number, members, name=()):
        self.job, self.number, self.group, self.name = job, number, Group(members), name
        self.rank, self.size = self.group.index(number), len(self.group)
        self.calls, self.reduced, self.freed = {True: 0, False: 0}, [], False

    def _met(self, value, *, survives=False):
        job = self.job
        with job.changed:
            call = self.calls[survives]
            self.calls[survives] += 1
            if not survives:
                if job.dies.get(self.number) == job.calls[self.number]:
                    job.die(self.number)
                fails = job.fails.get(self.number) == job.calls[self.number]
                job.calls[self.number] += 1
            given = job.given[self.name, survives, call]
            given[self.number] = value
            job.changed.notify_all()

            def over():
                missing = set(self.group) - given.keys()
                return (
                    missing <= job.dead if survives else not missing or missing & job.dead or self.name in job.revoked
                )

            assert job.changed.wait_for(over, limit(10)), f"{self.number} waits for {set(self.group) - given.keys()}"
            if not survives and (fails or len(given) < self.size):
                raise MPIError
            return [given[member] for member in self.group if member in given]

    def Set_errhandler(self, handler):
        assert handler == MPI.ERRORS_RETURN

    def Free(self):
        self.freed = True

    def Allreduce(self, source, target, op=MPI.SUM):
        self.reduced.append(target.nbytes)
        everyone = self._met(np.array(target if isinstance(source, str) else source))
        with np.errstate(all="ignore"):
            target[...] = op.reduce(everyone)

    def Iallreduce(self, source, target, op):
        return SimpleNamespace(Test=lambda: False, Wait=lambda: self.Allreduce(source, target, op))

    def Reduce(self, source, target):
        everyone = self._met(np.array(target if isinstance(source, str) else source))
        if target is not None:
            target[...] = np.add.reduce(everyone)

    def Barrier(self):
        self._met(None)

    def Allgatherv(self, own, whole):
        words, (counts, starts) = whole
        for values, count, start in zip(self._met(own.copy()), counts, starts, strict=True):
            words[start : start + count] = values

    def Allgather(self, own, target):
        target[:] = np.concatenate(self._met(own.copy()))

    def allgather(self, value):
        return self._met(value)

    def bcast(self, value, root=0):
        return self._met(value)[root]

    def Bcast(self, array, root=0):
        array[:] = self._met(array.copy())[root]

    def Split(self, color, key):
        colors = self._met(color)
        members = [member for member, its in zip(self.group, colors, strict=True) if its == color]
        name = (*self.name, self.calls[False], color)
        return None if color == MPI.UNDEFINED else Comm(self.job, self.number, members, name)

    def Agree(self, flag):
        everyone = self._met(flag, survives=True)
        if len(everyone) < self.size:
            raise MPIError
        return min(everyone)

    def Shrink(self):
        members = self._met(self.number, survives=True)
        return Comm(self.job, self.number, members, (*self.name, self.calls[True]))

    def Revoke(self):
        with self.job.changed:
            self.job.revoked.add(self.name)
            self.job.changed.notify_all()

    def _box(self, source, target, tag):
        return self.job.mail[self.name, source, target, tag]

    def send(self, value, target, tag):
        with self.job.changed:
            self._box(self.rank, target, tag).append(value)
            self.job.changed.notify_all()

    def recv(self, source, tag):
        job, box = self.job, self._box(source, self.rank, tag)

        def over():
            return box or self.group[source] in job.dead or self.name in job.revoked

        with job.changed:
            assert job.changed.wait_for(over, limit(10)), f"{self.number} waits for {self.group[source]}"
            if not box:
                raise MPIError
            return box.popleft()

    def Isend(self, array, target, tag):
        self.send(array.copy(), target, tag)
        return SimpleNamespace(Wait=lambda: None)

    def Irecv(self, array, source, tag):
        return SimpleNamespace(Wait=lambda: np.copyto(array, self.recv(source, tag)))


class World:
    def __repr__(self):
        return "a world"


WORLD = World()


def processes(*hosts):
    """Return one process for each host number given."""
    return tuple(Process(range(i, i + 1), f"h{host}", host, 100 + i) for i, host in enumerate(hosts))


def transport_of(comm, hosts=None, *, survives=True, device=None):
    """Return the transport of a process, with its `losses`: numbers, and the operation at which they were noticed."""
    made = MPITransport(MPI, Lifetime(WORLD), device or jax.local_devices()[0], survives=survives)
    made.losses = []

    def on_lost(survivors, lost, how):
        assert how[1] >= 0
        assert all(made.group.everyone[rank] == process for rank, process in lost.items())
        made.losses.append(([process.pid - 100 for process in lost.values()], how[0]))
        made.set_group(survivors)

    made.on_lost = on_lost
    made.set_group(ProcessGroup(comm, processes(*(hosts or [0] * comm.size))))
    return made


# --- losses -----------------------------------------------------------------------------------------------------------


def message(transport, number):
    """Sum 1, and the process's number, over all processes."""
    buffer = np.array([1.0, 10.0**transport.comm.number])

    def reduce():
        transport.comm.Allreduce(MPI.IN_PLACE, buffer)
        return buffer.copy()

    sent = ReduceMessage(f"message {number}", "", 7, buffers=[buffer], status=np.zeros(2), reduce=reduce)
    transport.run(sent)
    np.testing.assert_array_equal(sent.arrived, buffer)
    return buffer.tolist()


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
        return comm.name in comm.job.revoked

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

    def watch_only(self, peers):
        self.watched.append(peers)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_disagreement_is_raised_by_all_and_only_a_process_that_leaves_closes_the_world(leaves):
    def use(comm):
        transport = transport_of(comm)
        transport.watchdog = watchdog = Watchdog()
        other = FinalOperation("the end", "", CLOSE) if leaves else Operation("another", "", 7)
        with pytest.raises(DisagreementError, match="rank 0: gathering") as e:
            transport.run(other if comm.rank else GatherBytes(b"", "gathering", ""))
        assert ("rank 1: the end" if leaves else "rank 1: another") in str(e.value)
        assert not transport.torn
        if leaves:
            with pytest.raises(CollectiveError, match="a world is used"):
                transport.barrier()
        else:
            transport.barrier()
        return transport.lifetime.closed, watchdog.closed

    assert Job(2).run(use) == [(leaves, leaves)] * 2


def test_a_reported_failure_ends_the_operation_of_the_others():
    def use(comm):
        transport = transport_of(comm)
        if comm.rank == 1:
            transport.report_failure("in step 3: OSError")
        else:
            with pytest.raises(
                WorkerError, match=r"rank 1 failed in step 3: OSError\n.*Rank 0 stops too, in a barrier"
            ):
                transport.barrier()
        return transport.lifetime.closed, transport.torn, transport.inside

    assert Job(2).run(use) == [(False, False, False)] * 2


def test_after_an_error_in_an_operation_that_others_may_still_be_in_there_are_no_more():
    def use(comm):
        transport = transport_of(comm, survives=False)
        for begins in (None, partial(transport.mark_begun, Operation("a step", "", 7))):
            with pytest.raises(ZeroDivisionError), transport.collective():
                1 / 0 if begins is None else begins() or 1 / 0
            assert not transport.inside
            assert transport.torn is (begins is not None)
        with pytest.raises(WorkerError, match="rank 0 left a collective by an error while the others were in it"):
            transport.barrier()
        return transport.operation.about, transport.begun, transport.lock.locked()

    assert Job(1).run(use) == [("a step", 1, False)]


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


# --- groups -----------------------------------------------------------------------------------------------------------


def test_operations_are_counted_and_the_time_until_the_last_process_comes():
    def use(comm):
        transport, waited = transport_of(comm), 0.0
        for number in range(3):
            transport.barrier()
            assert (transport.begun, transport.completed, len(transport.ends)) == (number + 1,) * 3
            assert transport.waited > waited
            waited = transport.waited
        transport.set_group(transport.group)
        assert not transport.ends
        return waited < limit(60)

    assert Job(2).run(use) == [True] * 2


@pytest.mark.parametrize(
    ("hosts", "one_host", "several"), [([0, 0, 0], True, False), ([0, 1, 1], False, True), ([0, 1, 2], False, False)]
)
def test_a_group_of_several_hosts_has_large_pieces_and_algorithms(hosts, one_host, several):
    def use(comm):
        transport = transport_of(comm, hosts)
        before, freed = transport.algorithms, []
        assert transport.group.one_host is one_host
        assert transport.piece_bytes == (PIECE_BYTES if one_host else FLAT_PIECE_BYTES)
        assert (before is not None) is several
        assert (transport.algorithm("a channel") == "") is True
        if several:
            before.free = lambda: freed.append(before)
            transport.set_group(transport.group)
            assert freed == [before]
            assert transport.algorithms is not before
        transport.free()
        return comm.freed

    assert Job(3).run(use) == [True] * 3


def test_of_a_group_that_was_left_the_watchdog_watches_only_the_others():
    def use(comm):
        transport = transport_of(comm)
        everyone = transport.group.everyone
        transport.watchdog = watchdog = Watchdog()
        transport.peers = {process: f"peer {rank}" for rank, process in enumerate(everyone) if rank != 1}
        transport.set_group(ProcessGroup(comm, everyone[1:]))
        assert watchdog.watched == [["peer 2"]]
        return True

    assert Job(3).run(use) == [True] * 3
